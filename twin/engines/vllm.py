"""vLLM 0.28.0 on one device, with the patches of syv-ai/qwen38-27b-rtx3090 unless asked without.

Sources: `v1/worker/gpu_worker.py` (utilisation, profile), `v1/core/kv_cache_utils.py` and `platforms/interface.py`
(blocks, see `twin/memory/blocks.py`), `model_executor/layers/quantization/` (weights), `config/model.py` (checkpoints
in fp32 are run in 16 bits), `model_executor/layers/mamba/mamba_utils.py` and `model_executor/models/config.py` (types
of states), vllm-gguf-plugin (GGUFs since 0.24), the start scripts of that repository (sequences, tokens a step, back
ends).
"""

from msgspec.structs import replace

from twin.engines.rules import BackendRules, BlockPoolRules, EngineRules, StartupRules, StepLimits, stated
from twin.models.ggml import QUANTISED
from twin.units import GIB, MIB

TRITON = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
KVARN = ("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64")
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
ELEMENTWISE = ("bf16", "fp8", "int8", "mxfp4", "nvfp4")
"""Weights whose products have rates without the norms, rotation and gating between them."""
OF_CARDS = {"9.0": "fa3", "10.0": "trtllm_mha"}  # back ends of bf16 and fp8 by capability: `platforms/cuda.py`
STARTUP = StartupRules(
    sampled_copies=stated(
        3.5,
        0.03,
        "logits in 16 bits, in fp32, masked, and as probabilities: `v1/sample/ops/topk_topp_sampler.py` since 0.17; "
        "2.40 GiB with 1.55 GiB of graphs of a 27B with 256 sequences (its maker's validation receipts)",
        unit="1",
    ),
    plain_sampled_copies=stated(
        1.5, 0.1, "logits in 16 bits and in fp32: `v1/worker/gpu/model_runner.py` `_dummy_sampler_run`", unit="1"
    ),
    forward=stated(
        1.0,
        0.08,
        "1.44 GiB of an 8B at 16,384 tokens is counted as 1.44; of a 27B 0.10 a 1,000 tokens against 0.11 "
        "(vllm-project/vllm#52872)",
        unit="1",
    ),
    operand_bytes=stated(9, 0.3, "of int8: itself and two copies in fp32; 1.09 GiB warm, syv-ai docs/gotchas.md 16"),
    compiler=stated(
        0.85 * GIB,
        0.1,
        "0.87 and 0.89 GiB more at a first start of a 27B (syv-ai docs/gotchas.md 16, syv-ai/qwen38-27b-rtx3090#107), "
        "0.80 of an 8B on an H200",
    ),
    libraries={"9.0": 32 * MIB, "0.0": 8.125 * MIB},  # cuBLAS workspace as torch sets it (`CUDABlas.cpp`)
    towers=stated(1.46 * GIB, 0.3, "1.59 GiB with 0.13 of graphs of a 27B on two devices: noonghunna/club-3090#1087"),
    tower_rest=stated(
        0.34 * GIB,
        0.3,
        "an image of 16,384 tokens in patches (12 KiB a token) and as embeddings: `profile_run`; 0.33 GiB in 9.96 of a "
        "Gemma 3 4B, vllm-project/vllm#21489",
    ),
    reserves_graphs=True,
    graph_layer=stated(
        0.38 * MIB,
        0.12,
        "0.13, 0.17 and 0.36 GiB for 5, 7 and 16 graphs in pieces of 64 layers: noonghunna/club-3090#104, #44, "
        "gpustack/runner#251",
    ),
    whole_graph_layer=stated(
        0.143 * MIB, 0.3, "1.55 GiB for 51 graphs in pieces and 35 whole ones of 64 layers, less the pieces"
    ),
    graph_tokens=512,
    context=stated(
        0.22 * GIB, 0.15, "0.20 and 0.22 GiB on 3090 and 4090 (syv-ai/qwen38-27b-rtx3090#107), 0.22 on an H200"
    ),
    rank_context=stated(
        0.33 * GIB,
        0.5,
        "what the pool of two RTX 5090 leaves (noonghunna/club-3090#849); #1087 says up to 0.75",
        fitted_on=("club-849-q36-nvfp4-pool",),
    ),
)
POOL = BlockPoolRules(
    utilisation=0.92,
    batched_tokens=2048,
    max_sequences=256,
    larger=(  # of `vllm serve`; the class LLM takes as many sequences and twice to four times the tokens
        StepLimits(vram_bytes=160 * GIB, batched_tokens=16_384, max_sequences=1024),
        StepLimits(vram_bytes=70 * GIB, batched_tokens=8192, max_sequences=1024, but_not="a100"),
    ),
    bounds_context=True,
    startup=STARTUP,
    draft_graphs=stated(1.4 * GIB, 0.1, "reserved for up to 7 drafted tokens: syv-ai single-user/start_qwen.sh"),
    long_draft_graphs=stated(1.9 * GIB, 0.1, "reserved beyond 7 drafted tokens: the same script"),
    backend_workspace={
        "flashinfer": stated(
            0.565 * GIB,
            0.1,
            "5.10 GiB of pool against 5.63 and 5.69 with Triton in the same table",
            fitted_on=("vllm.u93.fp8.pool",),
        )
    },
    dequantises_prefix={
        "turboquant": stated(
            4,
            0.3,
            "the least whole number of 16-bit copies of the prefix that explains both published failures",
            unit="1",
            fitted_on=("vllm.turbo.oom32k", "vllm.turbo.oom128k"),
        )
    },
    untracked=stated(0.41 * GIB, 0.1, "used on the device beside weights: syv-ai docs/gotchas.md 9"),
)

BEFORE_GRAPHS = replace(  # 0.17 to 0.19: graphs are captured outside, `config/cache.py` has 0.9
    POOL,
    utilisation=0.9,
    larger=POOL.larger[1:],
    startup=replace(STARTUP, reserves_graphs=False, plain_sampled_copies=None),
)
RELEASES = {
    "0.11": replace(
        BEFORE_GRAPHS,
        startup=replace(
            BEFORE_GRAPHS.startup,
            sampled_copies=stated(
                9.5,
                0.005,
                "logits in 16 bits and fp32, then torch's sort: values, int64 indices, as many indices again, and a "
                "workspace of both: 4.76, 4.84, 5.56, 5.64 and 7.38 GiB of six models, llm-d-planner "
                "docs/empirical-vllm-memory-results.md",
                unit="1",
            ),
            context=stated(0.135 * GIB, 0.05, "0.13 and 0.14 GiB on one H100: the same page"),
            rank_context=stated(0.545 * GIB, 0.05, "0.54 and 0.55 GiB on two H100: the same page"),
        ),
    ),
    "0.17": BEFORE_GRAPHS,
    "0.20": replace(POOL, larger=POOL.larger[1:], startup=replace(STARTUP, plain_sampled_copies=None)),
    "0.25": replace(POOL, larger=POOL.larger[1:]),
}
"""How earlier releases size their pool: read in the sources of 0.11, 0.12, 0.14, 0.16 to 0.28 (`engine/arg_utils.py`,
`config/cache.py`, `envs.py`, `config/vllm.py`, `v1/sample/ops/`)."""

RULES = EngineRules(
    name="vllm",
    version="0.28",
    summary="vLLM 0.28: continuous batching over one pool of blocks, each layer shared by all devices",
    splits=("row", "layer"),
    page_tokens=16,
    layouts=("vram",),
    formats=("bf16", "fp8", *TRITON, *KVARN, *TURBOQUANT),
    weight_formats=("w4a16", "bf16", "fp8", "int8", "w8a16", "mxfp4", "nvfp4", "nf4", "fp32", "f16", *QUANTISED),
    usual_for=("w4a16", "bf16", "fp8", "int8", "w8a16", "mxfp4", "nvfp4", "nf4", "fp32"),
    loads_as={"fp32": "bf16"},
    heeds_full_states=True,
    full_states=("kimi_delta",),
    machine="rtx3090",
    chunk_tokens=2048,
    unprefilled_tokens=0,
    ngram="ram",
    workspace=stated(1.09 * GIB, 0.08, "its pool has rules of its own"),
    compute_dtype="bf16",
    block_pool=POOL,
    releases=RELEASES,
    makers={"AMD": ("bf16", "fp8", *TRITON)},
    backends=BackendRules(
        by_format={
            "bf16": ("flash_attention", "triton", "flashinfer", *OF_CARDS.values()),
            "fp8": ("flashinfer", "triton", *OF_CARDS.values()),
            **dict.fromkeys(TRITON, ("triton",)),
            **dict.fromkeys(KVARN, ("kvarn",)),
            **dict.fromkeys(TURBOQUANT, ("turboquant",)),
        },
        by_capability={card: dict.fromkeys(("bf16", "fp8"), backend) for card, backend in OF_CARDS.items()},
        widest_heads=dict.fromkeys(("flash_attention", "flashinfer", *OF_CARDS.values()), 256),
        verify_only={"bf16": ("split_kv",), "int8_per_token_head": ("split_kv", "split_kv_unpadded")},
        verify={"bf16": "split_kv", "int8_per_token_head": "split_kv"},
        piecewise=("flashinfer", "kvarn"),
    ),
    row_tiles={"w4a16": 16},
    host_step=True,
    implementations=dict.fromkeys(("linear/w4a16", "experts/w4a16"), "marlin")
    | dict.fromkeys(("linear/bf16", "sample/fp32", *(f"elementwise/{fmt}" for fmt in ELEMENTWISE)), "library")
    | dict.fromkeys(("all_reduce/peer", "all_gather/peer"), "nccl"),
)

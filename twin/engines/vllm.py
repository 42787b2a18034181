"""vLLM 0.28.0 on one device, with the patches of syv-ai/qwen38-27b-rtx3090 unless asked without.

Sources: `v1/worker/gpu_worker.py` (utilisation, profile), `v1/core/kv_cache_utils.py` and `platforms/interface.py`
(blocks, see `twin/memory/blocks.py`), `model_executor/layers/quantization/` (weights), `config/model.py` (checkpoints
in fp32 are run in 16 bits), `model_executor/layers/mamba/mamba_utils.py` and `model_executor/models/config.py` (types
of states), vllm-gguf-plugin (GGUFs since 0.24), the start scripts of that repository (sequences, tokens a step, back
ends).
"""

from twin.engines.rules import BackendRules, BlockPoolRules, EngineRules, stated
from twin.models.ggml import QUANTISED
from twin.units import GIB

TRITON = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
KVARN = ("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64")
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
ELEMENTWISE = ("bf16", "fp8", "int8", "mxfp4", "nvfp4")
"""Weights whose products have rates without the norms, rotation and gating between them."""
RULES = EngineRules(
    name="vllm",
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
    workspace=stated(1.09 * GIB, 0.08, "warm start: syv-ai docs/gotchas.md"),
    compute_dtype="bf16",
    block_pool=BlockPoolRules(
        utilisation=0.9,
        batched_tokens=2048,
        max_sequences=64,
        bounds_context=True,
        activations=stated(1.09 * GIB, 0.08, "warm start: syv-ai docs/gotchas.md"),
        cold_activations=stated(1.96 * GIB, 0.08, "the first run compiles: syv-ai docs/gotchas.md"),
        graphs=stated(
            1, 0.0, "captured graphs are no part of the profile unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS asks"
        ),
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
    ),
    backends=BackendRules(
        by_format={
            "bf16": ("flash_attention", "triton", "flashinfer"),
            "fp8": ("flashinfer", "triton"),
            **dict.fromkeys(TRITON, ("triton",)),
            **dict.fromkeys(KVARN, ("kvarn",)),
            **dict.fromkeys(TURBOQUANT, ("turboquant",)),
        },
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

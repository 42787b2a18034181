"""SGLang 0.5.15 on one device.

Sources: `srt/server_args.py` (`_handle_gpu_memory_settings`, `_get_default_attn_backend`, defaults of arguments),
`srt/model_executor/pool_configurator.py` and `model_runner_kv_cache_mixin.py` (pools, `_profile_available_bytes`,
`handle_max_mamba_cache`), `srt/configs/model_config.py` (`is_hybrid_swa_model`), `srt/configs/mamba_utils.py` (types of
states), `srt/arg_groups/overrides.py` (radix cache of states) and `speculative_hook.py` (sequences that draft),
`srt/layers/quantization/` (weights). The radix cache is on, as by default, whatever a question asks of prefixes.
"""

from twin.engines.rules import BackendRules, CardDefaults, EngineRules, TokenPoolRules, stated
from twin.units import GIB, MIB

_ANY = ("flashinfer", "triton")
_PRINTED = "a log's `avail mem` when weights begin"

ELEMENTWISE = ("bf16", "fp8", "int8", "mxfp4", "nvfp4")
"""Weights whose products have rates without the norms, rotation and gating between them."""
RULES = EngineRules(
    name="sglang",
    summary="SGLang 0.5.15 on one device: continuous batching over pools of tokens, windows and states",
    splits=("row",),
    page_tokens=1,
    layouts=("vram",),
    formats=("bf16", "fp8", "fp8_e5m2"),
    weight_formats=("bf16", "w4a16", "fp8", "int8", "w8a16", "mxfp4", "nvfp4", "nf4", "fp32", "f16"),
    loads_as={"fp32": "bf16"},
    state_element_bytes=4,
    machine="rtx3090",
    volunteers=False,
    chunk_tokens=2048,
    unprefilled_tokens=0,
    ngram="ram",
    workspace=stated(0.5 * GIB, 0.2, f"a context: {_PRINTED} on an H200, sgl-project/sglang#11716"),
    compute_dtype="bf16",
    token_pool=TokenPoolRules(
        by_card=(
            CardDefaults(below_bytes=20 * GIB, chunk_tokens=2048, graph_sequences=8, graph_sequences_of_four=8),
            CardDefaults(below_bytes=35 * GIB, chunk_tokens=2048, graph_sequences=24, graph_sequences_of_four=80),
            CardDefaults(below_bytes=60 * GIB, chunk_tokens=4096, graph_sequences=32, graph_sequences_of_four=160),
            CardDefaults(below_bytes=160 * GIB, chunk_tokens=8192, graph_sequences=256, graph_sequences_of_four=512),
            CardDefaults(below_bytes=0, chunk_tokens=16384, graph_sequences=512, graph_sequences_of_four=512),
        ),
        reserved_bytes=512 * MIB,
        reserved_per_chunk_token=1.5 * MIB,
        least_reserved_chunk=2048,
        reserved_per_sequence=2 * MIB,
        reserved_per_device=GIB / 8,
        reserved_per_prefill_graph=8 * MIB,
        prefill_graph_steps=((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (1 << 31, 512)),
        floor_from_bytes=60 * GIB,
        floor_bytes=10 * GIB,
        driver_bytes=0.45 * GIB,  # 24,576 MiB of an RTX 3090 against 23.56 GiB, 81,559 MiB of an H100 against 79.18
        tower_share=0.95,
        tower_parameters=12 * 24 * 1024**2,  # a tower of 24 layers of width 1,024, 12 x width^2 each
        tower_slope=0.1,
        tower_bounds=(0.8, 1.05),
        window_share=0.8,
        whole_windows_from=512,
        state_share=0.9,
        states_per_sequence=5,  # 3, and 2 more of the overlapped `extra_buffer`, the default where kernels allow it
        state_kept_every=256,
        evicted_every=128,
        max_sequences=2048,
        drafted_sequences=48,
        bounds_context=True,
        context=stated(
            0.5 * GIB, 0.2, "139.80 GiB of an H200 less 2.01 of its ranks less 137.29 free: sgl-project/sglang#11716"
        ),
        collectives={
            "pcie": {
                2: stated(0.15 * GIB, 0.3, f"{_PRINTED} on two RTX 3090: mattbucci/2x-3090 sprint-2026-06 logs"),
                4: stated(0.39 * GIB, 0.3, "four RTX PRO 6000: sgl-project/sglang#40558"),
            },
            "nvlink": {
                2: stated(1.0 * GIB, 0.3, "two H100", fitted_on=("llmd-1921-qwen32-h100-pool",)),
                8: stated(2.01 * GIB, 0.2, "eight H200: sgl-project/sglang#11716"),
            },
        },
        loading=stated(
            0.18 * GIB, 0.5, "free before less weights less pools", fitted_on=("sgl-coder30b-pool", "sgl-ream30b-pool")
        ),
    ),
    backends=BackendRules(
        by_format={
            **dict.fromkeys(("bf16", "fp8"), (*_ANY, "fa3", "trtllm_mha", "aiter")),
            "fp8_e5m2": _ANY,
        },
        by_capability={
            "9.0": {"bf16": "fa3", "fp8": "fa3", "fp8_e5m2": "triton"},
            "10.0": dict.fromkeys(("bf16", "fp8"), "trtllm_mha"),
        },
        of_latents={"9.0": "fa3", "10.0": "flashinfer", "": "triton"},
        without_cuda="aiter",
        widest_heads=dict.fromkeys(("flashinfer", "fa3", "trtllm_mha"), 256),
    ),
    least_capability="7.5",
    needs={"triton/fp8": "8.9"},
    host_step=True,
    implementations=dict.fromkeys(("linear/w4a16", "experts/w4a16", "linear/w8a16", "experts/w8a16"), "marlin")
    | dict.fromkeys(("linear/bf16", "elementwise/bf16", "sample/fp32"), "library"),
)

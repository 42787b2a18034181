"""transformers 5.24: `generate` with a cache of its own kinds, one batch at a time.

Sources: `cache_utils.py` (dynamic, static, offloaded and quantised caches: groups of 64, the newest 128 tokens in 16
bits; states in the type that kernels return, fp32), `generation/utils.py` (a prompt in one pass, logits of its last
token), `integrations/sdpa_attention.py`, and the modeling files of Llama and its like (what a layer holds at its
widest: residual and norm, gate, up and their product).
Planes of a quantised cache are dequantised whole in every pass, before they are joined with the new tokens.
"""

from twin.engines.rules import BackendRules, EngineRules, TensorCacheRules, stated
from twin.units import GIB

_PLAIN = ("bf16", "fp16")
_QUANTISED = ("int4_g64", "int2_g64", "fp8")

RULES = EngineRules(
    name="transformers",
    summary="transformers 5.24: generate, layers split over devices in order, planes as tensors that grow",
    page_tokens=1,
    layouts=("vram", "static", "stream"),
    formats=(*_PLAIN, *_QUANTISED),
    host_formats=_PLAIN,
    weight_formats=("bf16", "f16", "fp32", "w4a16", "w8a16", "int8", "fp8", "mxfp4", "nf4"),
    state_element_bytes=4,
    machine="rtx3090",
    volunteers=False,
    chunk_tokens=2**20,
    unprefilled_tokens=0,
    ngram="ram",
    workspace=stated(0.6 * GIB, 0.3, "a context of 0.5 GiB (sgl-project/sglang#11716) and what libraries keep"),
    compute_dtype="bf16",
    tensor_cache=TensorCacheRules(residual_tokens=128, live_hidden=2, live_intermediate=3),
    backends=BackendRules(
        by_format=dict.fromkeys((*_PLAIN, *_QUANTISED), ("sdpa", "flash_attention_2", "eager")),
    ),
    host_step=True,
    implementations=dict.fromkeys(("linear/bf16", "elementwise/bf16", "sample/fp32"), "library"),
)

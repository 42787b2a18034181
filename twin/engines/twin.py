"""The kernels of this project (`realkernels/`): what `twin validate --device` runs, under the rules of their backends.

A whole model can be predicted under these rules where a machine's profile has a linear rate for its weights' format.
"""

from hwprofiles.rates import Rate
from twin.engines.rules import EngineRules, SparseRules
from twin.engines.twin_plans import PLANS
from twin.units import MIB

PLAIN = ("fp16", "bf16", "fp32")
QUANTISED = (
    "fp8",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "q8_0",
    "q4_0",
    "exl3_k4v4",
    "exl3_k8v8",
    "kvarn_k4v2_g128",
    "turboquant_4bit_nc",
)
"""Formats whose codec in `realkernels/codecs/` has a form for decode attention."""

RECORDS = ("int8_per_token_head", "int4_per_token_head", "q8_0", "q4_0", "exl3_k4v4")
"""Formats whose interleaved blocks (`realkernels/codecs/interleaved.py`) a decode step gathers from the host."""

INLINE = ("int8_per_token_head",)
"""Formats whose published arrangement, scales between the codes, has a backend of its own: `twin_inline`."""

RULES = EngineRules(
    name="twin",
    summary="this project's own kernels: blocks read whole, selections split by bucket, copies beside kernels",
    page_tokens=256,
    layouts=("offload", "vram"),
    formats=(*PLAIN, *QUANTISED),
    host_formats=(*PLAIN, *RECORDS),
    record_formats=RECORDS,
    weight_formats=("exl3", "w4a16", "bf16"),
    machine="3x-rtx3090",
    chunk_tokens=4096,
    prefilled_short_of=1,
    state_element_bytes=2,
    hop_element_bytes=2,
    needs={"fp8": "8.9"},
    backends=dict.fromkeys((*PLAIN, *QUANTISED), ("twin",)) | dict.fromkeys(INLINE, ("twin", "twin_inline")),
    attend_plans=PLANS,
    prefill_piece_tokens=8192,
    ngram="disk",
    workspace=Rate(
        value=1_500_000_000,
        unit="B",
        spread=0.3,
        n=1,
        source="datasheet",
        date="2026-11-29",
        note="an allowance for a context, libraries and buffers of a chunk",
    ),
    compute_dtype="bf16",
    sparse_kernels=SparseRules(
        selection_alignment=32,
        index_element_bytes=None,
        score_bytes=4,
        head_tile=16,
        splits_selection=True,
        score_rows=4096,
        staging_bytes=32 * MIB,
        copies_whole_buckets=True,
        overlaps_copies=True,
    ),
)

"""The kernels of this project (`realkernels/`): what `twin validate --device` runs, under the rules of their backends.

A whole model can be predicted under these rules where a machine's profile has a linear rate for its weights' format.
"""

from hwprofiles.rates import Rate
from twin.engines.rules import EngineRules
from twin.units import MIB

RULES = EngineRules(
    name="twin",
    summary="this project's own kernels: blocks read whole, selections split by bucket, copies beside kernels",
    page_tokens=256,
    layouts=("vram", "offload"),
    formats=("fp16", "bf16", "fp32"),
    chunk_tokens=4096,
    prefilled_short_of=1,
    state_element_bytes=2,
    hop_element_bytes=2,
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
    selection_alignment=32,
    index_element_bytes=None,
    score_bytes=4,
    head_tile=16,
    splits_selection=True,
    compute_dtype="bf16",
    score_rows=4096,
    staging_bytes=32 * MIB,
    copies_whole_buckets=True,
    overlaps_copies=True,
)

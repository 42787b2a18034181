"""The kernels of this project (`realkernels/`): what `twin validate --device` runs, under the rules of their backends.

A whole model can be predicted under these rules where a machine's profile has a linear rate for its weights' format.
"""

from msgspec.structs import replace

from twin.engines.rules import BackendRules, EngineRules, OwnKernelRules, SparseRules, stated
from twin.operations.occupancy import DecodePlan, ThreadBlock
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
    "q5_1",
    "iq4_nl",
)
"""Formats whose codec in `realkernels/codecs/` has a form for decode attention."""

INTERLEAVED = ("int8_per_token_head", "int4_per_token_head", "q8_0", "q4_0", "exl3_k4v4", "q5_1", "iq4_nl")
"""Formats that decode steps gather from the host in interleaved blocks (`realkernels/caches/interleaved.py`)."""

INLINE = ("int8_per_token_head",)
"""Formats whose published arrangement, scales between the codes, has a backend of its own: `twin_inline`."""

_WIDE = ThreadBlock(64, 32, 1, 2)


def _narrow(tile: int) -> DecodePlan:
    """Up to three sets of 8 query rows, then 32 rows at once."""
    return DecodePlan(thread_blocks=(*(ThreadBlock(tile, 8, sets, 2) for sets in (1, 2, 3)), _WIDE))


_PLAIN = DecodePlan(alone=ThreadBlock(64, 16, 1, 1), thread_blocks=(ThreadBlock(32, 64, 1, 1),))
_SCALED = (ThreadBlock(64, 16, 1, 2, prologue=40), _WIDE)
_GROUPS = DecodePlan(alone=ThreadBlock(64, 8, 1, 4), thread_blocks=(ThreadBlock(64, 8, 2, 2), _WIDE))

DECODE_PLANS: dict[str, DecodePlan] = {
    **dict.fromkeys(("fp16", "bf16"), _PLAIN),
    "fp8": DecodePlan(thread_blocks=(*_SCALED, ThreadBlock(64, 48, 1, 2))),
    **dict.fromkeys(
        ("int8_per_token_head", "fp8_per_token_head"), DecodePlan(thread_blocks=(*_SCALED, ThreadBlock(64, 16, 3, 2)))
    ),
    "int4_per_token_head": _narrow(128),
    **dict.fromkeys(("q8_0", "exl3_k8v8", "q5_1", "iq4_nl"), _narrow(64)),
    **dict.fromkeys(("q4_0", "exl3_k4v4"), _GROUPS),
    "turboquant_4bit_nc": DecodePlan(
        alone=ThreadBlock(64, 8, 1, 3),
        thread_blocks=(ThreadBlock(64, 8, 2, 2), ThreadBlock(64, 8, 3, 2), _WIDE, ThreadBlock(128, 16, 3, 1)),
    ),
    "kvarn_k4v2_g128": DecodePlan(
        alone=ThreadBlock(128, 8, 1, 3), thread_blocks=(ThreadBlock(128, 8, 1, 4),), other_splits=1
    ),
}
"""By format, held equal to the kernels' own plans (`realkernels/codecs/`) for all query rows.

They are those of multiprocessors with 228 KiB of shared memory, taken over to smaller ones, which hold fewer thread
blocks or sets.
"""

RULES = EngineRules(
    name="twin",
    summary="this project's own kernels: blocks read whole, selections split by bucket, copies beside kernels",
    page_tokens=256,
    layouts=("offload", "vram"),
    formats=(*PLAIN, *QUANTISED),
    host_formats=(*PLAIN, *INTERLEAVED),
    weight_formats=("exl3", "w4a16", "bf16"),
    usual_for=(),
    machine="3x-rtx3090",
    chunk_tokens=4096,
    unprefilled_tokens=1,
    needs={"fp8": "8.9"},
    backends=BackendRules(
        by_format=dict.fromkeys((*PLAIN, *QUANTISED), ("twin",)) | dict.fromkeys(INLINE, ("twin", "twin_inline"))
    ),
    own_kernels=OwnKernelRules(decode_plans=DECODE_PLANS, kv_chunk_tokens=8192, interleaved_formats=INTERLEAVED),
    ngram="disk",
    embedding_on_host=True,
    workspace=replace(
        stated(1_500_000_000, 0.3, "an allowance for a context, libraries and buffers of a chunk"), source="datasheet"
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

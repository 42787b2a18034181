"""exllamav3 1.4.9 to 1.6.5 with the public KV-offload patch.

Sources: `constants.py` (page), `modules/qsa_indexer.py` (selection), `modules/attention_fn/qsa_triton.py` (tiles),
`cache/qsa_offload.py` of the port cosmicnag/exllamav3@b7dcfa62 (staging), `generator` defaults (chunk),
`cache/mla.py` (compressed caches), `cache/cache.py` (types of states). Windows are kept whole; the rings that
`modules/sliding_attn.py` keeps for Gemma 4, gpt-oss, MiMo-V2, Step 3.5 and Laguna are not modelled.
"""

from twin.engines.rules import EngineRules, SparseRules, stated
from twin.formats import EXL3_BITS
from twin.units import MIB

RULES = EngineRules(
    name="exllamav3",
    summary="exllamav3 1.6 with the KV-offload patch: layers split over devices in order, one sequence at a time",
    splits=("layer", "row"),
    page_tokens=256,
    layouts=("offload", "vram"),
    formats=("fp16", *(f"exl3_k{key}v{value}" for key in EXL3_BITS for value in EXL3_BITS)),
    host_formats=("fp16",),
    weight_formats=("exl3",),
    usual_for=("exl3",),
    machine="3x-rtx3090",
    chunk_tokens=2048,
    unprefilled_tokens=1,
    hop_element_bytes=4,
    ngram="disk",
    embedding_on_host=True,
    full_states=("mamba2",),
    workspace=stated(
        2_013_853_901,
        0.03,
        "what 64.35 GiB of loaded VRAM leave beside weights and recurrent state, a third per device",
        fitted_on=("blog.vram_model",),
    ),
    shared_workspace=0.5,  # 23,261 MiB in all over four ranks, 20,390 on one device: row exl3-100-6-4-2k-vram
    compute_dtype="fp16",
    sparse_kernels=SparseRules(
        selection_alignment=32,
        index_element_bytes=2,
        score_bytes=2,
        head_tile=16,
        splits_selection=False,
        score_rows=1024,
        staging_bytes=32 * MIB,
        copies_whole_buckets=False,
        overlaps_copies=False,
    ),
)

"""Latent attention by hand: 4 heads, a compressed vector of 16 and a roped key of 4 that all heads share."""

import pytest
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import pooled
from tests.worlds import model, step
from twin.models import ModelSpec
from twin.models.mixers import Indexer, LatentAttention
from twin.models.spec import FeedForward, Layer
from twin.operations import latent, lower

MIXER = LatentAttention(query_heads=4, kv_rank=16, rope_dim=4, nope_dim=8, value_dim=6, query_rank=12)
INDEXER = Indexer(query_heads=2, head_dim=128, budget=32, ratio=1, weighted=True)


def of(mixer: LatentAttention) -> ModelSpec:
    layer = Layer(mixers=(mixer,), feed_forward=FeedForward(intermediate=16))
    return replace(model(layers=2, every=1, sparse=False), kinds={"latent": layer}, order=(("latent", 1),))


def test_parameters_and_cache_of_a_layer() -> None:
    """Down and up for queries, down for the latent and the key, up for keys and values, out."""
    queries, compressed = 12 * (8 + 4 * 12), 8 * 20
    assert MIXER.matrices(8) == queries + compressed + 16 * 4 * (8 + 6) + 4 * 6 * 8
    direct = replace(MIXER, query_rank=0)
    assert direct.matrices(8) - MIXER.matrices(8) == 8 * 4 * 12 - queries
    assert (MIXER.cached_bytes(2), pooled(spec=of(MIXER)).plane_bytes) == (40, 40)
    assert pooled(spec=of(MIXER), kv_dtype="fp8").plane_bytes == 20
    scored = replace(MIXER, indexer=INDEXER)
    assert scored.cached_bytes(2) == 40 + 128 + 4
    assert scored.matrices(8) - MIXER.matrices(8) == 12 * 2 * 128 + 8 * 128 + 8 * 2


@pytest.mark.parametrize(("q_tokens", "batch"), [(1, 1), (3, 2)])
def test_a_decode_step_meets_every_cached_vector_with_every_head(q_tokens: int, batch: int) -> None:
    (attend,) = latent.decode_ops(pooled(spec=of(MIXER)), MIXER, step(100 - q_tokens, q_tokens, batch), 0, first=1)
    assert attend.vram_bytes == 100 * 40 * batch
    assert attend.flops == 2 * 4 * (20 + 16) * 100 * q_tokens * batch
    assert attend.kernel == "attend_latent_decode/flash_attention/bf16"


def test_a_chunk_expands_what_is_cached_and_attends_with_whole_heads() -> None:
    append, attend = latent.prefill_ops(pooled(spec=of(MIXER)), MIXER, step(64, 16), 0)
    assert append.vram_bytes == 16 * (40 + 40)
    pairs = 16 * 64 + 16 * 17 / 2
    assert attend.flops == 2 * (64 * 16 * 4 * (8 + 6) + 4 * (8 + 4 + 6) * pairs)
    assert attend.after == (0,)


def test_an_indexer_scores_all_tokens_and_attention_reads_its_budget() -> None:
    scored = replace(MIXER, indexer=INDEXER)
    case = pooled(spec=of(scored))
    assert len(latent.decode_ops(case, scored, step(31), 0, first=0)) == 1  # no more tokens than the budget
    score, attend = latent.decode_ops(case, scored, step(99), 0, first=0)
    assert (score.vram_bytes, score.flops) == (100 * 132 + 4 * 100, 2 * 2 * 128 * 100)
    assert (attend.vram_bytes, attend.after) == (32 * 40, (0,))
    _, scores, sparse = latent.prefill_ops(case, scored, step(64, 16), 0)
    assert (scores.after, sparse.after, sparse.kernel.split("/")[0]) == ((0,), (1,), "attend_latent_sparse")
    assert sparse.flops == 2 * 4 * (20 + 16) * 16 * 32


def test_layers_of_latent_attention_are_lowered_as_others_are() -> None:
    spec = of(MIXER)
    program = lower.decode_program(pooled(spec=spec), step(99), 1)
    assert sum(graph.times for graph in program for op in graph.ops if op.part == "attention") == 2
    chunk = lower.prefill_program(pooled(spec=spec), step(0, 16), 1)
    assert {op.part for graph in chunk for op in graph.ops} == {"weights", "elementwise", "append", "attention"}

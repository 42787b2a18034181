"""Scoring and top-k: one row in decode, slabs of rows in prefill, pooled keys in VRAM or on the host."""

import pytest

from tests.worlds import case, step
from twin.operations.attention import decode_selection, prefill_selection
from twin.operations.ops import Engine

KEY_BYTES = 4 * 2
"""A pooled key of the toy model: 4 elements in fp16."""

SCORE_FLOPS = 2 * 2 * 4
"""Two index heads of 4 elements."""


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_scores_every_complete_block_once(batch: int) -> None:
    """103 tokens of each sequence hold 25 complete blocks; a score is written and read in fp16."""
    scan, select = decode_selection(case(), step(102, batch=batch), 0, first=1)
    assert (scan.vram_bytes, scan.flops) == (25 * batch * KEY_BYTES, 25 * batch * SCORE_FLOPS)
    assert select.vram_bytes == 25 * batch * 2 * 2
    assert (scan.after, select.after) == ((0,), (1,))


@pytest.mark.parametrize(("rows", "batch", "slabs"), [(8, 1, 2), (8, 3, 6), (9, 1, 3), (4, 2, 2), (1, 1, 1)])
def test_a_chunk_is_scored_slab_by_slab(rows: int, batch: int, slabs: int) -> None:
    """Slabs of 4 rows each read all pooled keys; all of them together score every row against all before it, once."""
    chunk = step(32, rows, batch=batch)
    score, select = prefill_selection(case(rules={"score_rows": 4}), chunk, 0, first=0)
    scores = batch * sum(range(33, 33 + rows)) / 4
    assert score.calls == select.calls == slabs
    assert score.flops * slabs == pytest.approx(scores * SCORE_FLOPS)
    assert score.vram_bytes * slabs == pytest.approx(slabs * ((32 + rows) // 4) * KEY_BYTES + 2 * scores)
    assert select.vram_bytes * slabs == pytest.approx(2 * scores)


@pytest.mark.parametrize(("first", "after"), [(0, ()), (3, (2,))])
def test_selection_is_a_chain_behind_the_op_before_it(first: int, after: tuple[int, ...]) -> None:
    score, select = prefill_selection(case(), step(32, 8), 0, first=first)
    assert (score.after, select.after) == (after, (first,))


def test_pooled_keys_on_the_host_cross_the_link_once_a_slab() -> None:
    asked = case(pooled="host", rules={"score_rows": 4})
    score, _ = prefill_selection(asked, step(32, 8), 0, first=0)
    scan, _ = decode_selection(asked, step(39), 0, first=1)
    assert (score.engine, score.link_bytes, score.calls) == (Engine.H2D, 10 * KEY_BYTES, 2)
    assert (scan.engine, scan.link_bytes, scan.vram_bytes) == (Engine.H2D, 10 * KEY_BYTES, 0)

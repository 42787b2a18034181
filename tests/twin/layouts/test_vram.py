"""vram: everything in device memory. Flash-Next by hand, the toy model on paper."""

from tests.worlds import case, flash_next, model, step
from twin.layouts.vram import LAYOUT
from twin.operations.ops import Engine


def test_a_long_step_scans_pooled_keys_selects_and_reads_the_selection_a_short_one_the_whole_cache() -> None:
    asked = flash_next(layout="vram")
    scan, select, read = LAYOUT.decode_ops(asked, step(1_048_319), 0, first=1)
    assert scan.vram_bytes == 1_048_320 // 4 * 256 == 1_048_320 * 64
    assert scan.flops == 1_048_320 // 4 * 2 * 4 * 128 == 1_048_320 * 256
    assert select.vram_bytes == 2 * 2 * 1_048_320 // 4
    assert read.vram_bytes == 2048 * 2048
    assert [op.after for op in (scan, select, read)] == [(0,), (1,), (2,)]
    for past in (0, 2050):
        (short,) = LAYOUT.decode_ops(asked, step(past), 0, first=1)
        assert (short.part, short.vram_bytes, short.after) == ("kv_gather", (past + 1) * 2048, (0,))


def test_a_sparse_chunk_scores_selects_and_attends() -> None:
    """Rows 25 to 32 of the toy model: 8 pooled keys, (25 + ... + 32) / 4 scores, 8 rows x 32 padded tokens."""
    (block,) = LAYOUT.prefill_graphs(case(layout="vram"), step(24, 8), 0, times=1)
    score, select, attend = block.ops
    scores = sum(range(25, 33)) / 4
    assert score.flops == scores * 2 * 2 * 4
    assert score.vram_bytes == 8 * 8 + 2 * scores
    assert select.vram_bytes == 2 * scores
    assert attend.flops == 4 * 8 * 32 * (2 * 16) * 8  # rows x K_pad x heads padded to tiles of 16 x dim
    assert attend.vram_bytes == 32 * 64 + 8 * 32 * 4 * 2  # all K and V once, the index list once per kv head
    assert [op.after for op in block.ops] == [(), (0,), (1,)]


def test_nothing_ever_crosses_the_link() -> None:
    asked = case(layout="vram")
    graphs = [graph for past in (0, 32) for graph in LAYOUT.prefill_graphs(asked, step(past, 16), 0, times=1)]
    ops = [*LAYOUT.decode_ops(asked, step(100), 0, first=1), *(op for graph in graphs for op in graph.ops)]
    assert all(op.engine is Engine.SM and not op.link_bytes for op in ops)
    assert LAYOUT.buckets(asked, step(32, 16)) == 0
    assert list(LAYOUT.breaks(asked)) == []
    assert LAYOUT.bucket_tokens(asked) == 0
    dense = case(layout="vram", spec=model(every=1, sparse=False))
    assert (LAYOUT.placement(dense).vram_bytes, LAYOUT.working_bytes(dense)) == (2 * 2 * 8 * 2, {})

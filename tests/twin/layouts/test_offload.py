"""offload: K, V and raw keys on the host. Published bytes by hand, gathers row by row, stages page by page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS, case, flash_next, machine, step
from twin.ask.case import Case
from twin.cost.prefill import chunk_at, chunk_count
from twin.cost.roofline import Roofs
from twin.cost.schedule import schedule
from twin.errors import MissingRate
from twin.layouts.offload import LAYOUT, naive_read_bytes
from twin.operations.counts import is_sparse
from twin.operations.ops import Carried, Engine, OpGraph, Step
from twin.prediction import prefill_breakdown
from twin.units import MIB

PAGE_BYTES = 256 * 2048
"""One page of K and V in one layer of Flash-Next: 524,288 bytes."""


def staged(asked: Case, chunk: Step) -> OpGraph:
    *_, block = LAYOUT.prefill_graphs(asked, chunk, 0, times=1)
    return block


def test_bytes_per_token_and_staging_buffers_where_something_is_staged() -> None:
    """64 bytes in VRAM and 2,304 on the host a layer: 0.75 and 27.00 KiB over 12."""
    for pooled, vram, host in (("vram", 0.75, 27), ("host", 0, 27.75)):
        placed = LAYOUT.placement(flash_next(pooled=pooled))
        assert (12 * placed.vram_bytes, 12 * placed.host_bytes) == (vram * 1024, host * 1024)
    asked = ({}, {"prefill": "staged"}, {"copies": "overlapped"}, {"prefill": "naive"}, {"batch": 2})
    buffers = [sum(LAYOUT.working_bytes(flash_next(**each)).values()) / (32 * MIB) for each in asked]
    assert buffers == [1, 1, 2, 0, 0]


def test_a_long_step_gathers_the_selection_over_the_link_and_writes_one_token_a_short_one_the_whole_cache() -> None:
    scan, select, gather, write = LAYOUT.decode_ops(flash_next(), step(1_048_319), 0, first=1)
    assert (gather.engine, gather.link_bytes, gather.run_bytes) == (Engine.H2D, 2048 * 2048, 4096)
    assert gather.kernel == "gather_host/exllamav3/fp16"
    assert 12 * gather.link_bytes == 48 * MIB
    assert (write.engine, write.link_bytes) == (Engine.D2H, 2304)
    assert (scan.engine, scan.link_bytes, select.link_bytes) == (Engine.SM, 0, 0)
    assert [op.after for op in (scan, select, gather, write)] == [(0,), (1,), (2,), (0,)]
    gather, write = LAYOUT.decode_ops(flash_next(host_pages="4KiB"), step(2050), 0, first=1)
    assert (gather.link_bytes, gather.run_bytes) == (2051 * 2048, 262_144)
    assert gather.kernel == "gather_host_4k/exllamav3/fp16"  # small pages have a rate of their own
    assert gather.after == write.after == (0,)


@pytest.mark.parametrize(
    ("past", "rows", "batch", "buckets"),
    [
        (2048, 2048, 1, 1),
        (2048, 2048, 2, 0),
        (14_336, 2048, 1, 1),  # a buffer of 32 MiB holds 64 pages of 256
        (16_384, 2048, 1, 2),
        (8320 * 256 - 2048, 2048, 1, 0),  # 2,048 x 2,080 = 2 x 8,320 x 256: no longer more than twice the pages
        (8319 * 256 - 2048, 2048, 1, 130),
        (2048, 4, 1, 1),
        (32_512, 4, 1, 0),
    ],
)
def test_the_rule_stages_where_rows_would_read_more_than_twice_the_pages(
    past: int, rows: int, batch: int, buckets: int
) -> None:
    chunk = step(past, rows, batch=batch)
    assert LAYOUT.is_staged(flash_next(), chunk) is bool(buckets)
    assert LAYOUT.buckets(flash_next(), chunk) == buckets
    assert LAYOUT.is_staged(flash_next(prefill="naive"), chunk) is False


def test_a_staged_chunk_copies_all_pages_in_use_once() -> None:
    block = staged(flash_next(), step(1_000_000, 2048))
    copy, attend, combine = block.ops
    assert copy.link_bytes * copy.calls * block.iterations == pytest.approx(-(-1_002_048 // 256) * PAGE_BYTES)
    assert attend.vram_bytes == pytest.approx(copy.link_bytes * copy.calls + 2048 * 2080 * 4 * 2)  # and the index list
    assert attend.flops == 4 * 2048 * 2080 * 32 * 256  # 12 heads of a group padded to a tile of 16
    assert combine.vram_bytes == 2048 * (2 * 32 + 2 * 24) * 256 * 4
    assert (attend.after, combine.after) == ((0,), (1,))


def test_a_kernel_never_overtakes_the_combination_of_the_bucket_before_nor_a_copy_its_buffer() -> None:
    """Copy 5, attend 9, combine 1, 100 buckets: bound by the kernels, 5 + 100 x 10. One bucket is not combined."""
    serial, graph = (staged(flash_next(copies=each), step(100_000, 2048)) for each in ("serial", "overlapped"))
    assert Carried(0, 2, 1) in serial.carried
    assert Carried(0, 1, 2) in graph.carried
    hundred = OpGraph(ops=graph.ops, iterations=100, carried=graph.carried)
    assert schedule((hundred,), [[5.0, 9.0, 1.0]]).total_s == pytest.approx(1005)
    one = staged(flash_next(), step(2048, 2048))
    assert (one.iterations, len(one.ops)) == (1, 2)


def row_by_row(asked: Case, chunk: Step) -> int:
    """Bytes that every row of a sparse chunk reads: the best blocks that exist, and the open tail."""
    indexer = asked.model.indexer
    assert indexer is not None
    tokens = 0
    for row in range(chunk.kv_tokens + 1, chunk.end + 1):
        blocks = min(indexer.block_topk, row // indexer.ratio)
        tokens += blocks * indexer.ratio + row % indexer.ratio
    return tokens * asked.plane_bytes * chunk.batch


@LAWS
@given(st.integers(0, 4000), st.integers(1, 600), st.integers(1, 3))
def test_naive_bytes_are_those_of_every_row(past: int, rows: int, batch: int) -> None:
    chunk = step(past, rows, batch=batch)
    assert naive_read_bytes(flash_next(), chunk) == row_by_row(flash_next(), chunk)
    assert naive_read_bytes(case(), chunk) == row_by_row(case(), chunk)


@pytest.mark.parametrize("prompt", [2052, 6001])
def test_naive_bytes_of_short_prompts(prompt: int) -> None:
    """Dense chunks read all that lies before them; tokens of sparse chunks read their own selection."""
    asked, expected = flash_next(prompt, prefill="naive"), 0
    for chunk in (chunk_at(asked, prompt, index) for index in range(chunk_count(asked, prompt))):
        sparse = is_sparse(asked.indexer, chunk.end)
        expected += row_by_row(asked, chunk) if sparse else chunk.kv_tokens * asked.plane_bytes
    assert prefill_breakdown(asked, Roofs(machine())).link_bytes == pytest.approx(12 * expected, rel=1e-12)


@pytest.mark.parametrize("asked", [{}, {"prefill": "staged"}, {"staging_bytes": 3 * MIB}, {"copies": "overlapped"}])
def test_steps_name_every_context_after_which_a_chunk_changes(asked: dict[str, str]) -> None:
    """Between two steps all chunks of 2,048 rows have as many buckets."""
    of_case = flash_next(**asked)
    bucket = LAYOUT.bucket_tokens(of_case)
    steps = sorted({*LAYOUT.breaks(of_case), *range(bucket, 2_400_000, bucket)})
    ends = range(4096, 2_400_000, 2048)
    buckets = [LAYOUT.buckets(of_case, step(end - 2048, 2048)) for end in ends]
    changes = [end for end, now, then in zip(ends, buckets, buckets[1:], strict=False) if now != then]
    assert len(changes) > 50
    assert all(any(end <= context < end + 2048 for context in steps) for end in changes)


def of_twin(fmt: str, **asked: object) -> Case:
    return flash_next(100_000, engine="twin", layout="offload", kv_dtype=fmt, **asked)


@pytest.mark.parametrize(("fmt", "token_bytes"), [("int8_per_token_head", 1040), ("q4_0", 576), ("exl3_k4v4", 576)])
def test_an_interleaved_block_is_one_run_of_k_and_v_while_plain_and_borrowed_planes_lie_apart(
    fmt: str, token_bytes: int
) -> None:
    *_, gather, write = LAYOUT.decode_ops(of_twin(fmt), step(100_002), 0, first=1)
    assert gather.kernel == f"gather_host/twin/{fmt}"
    assert (gather.link_bytes, gather.run_bytes) == ((2048 + 3) * token_bytes, 4 * token_bytes)
    assert write.link_bytes == token_bytes + 256
    short, _ = LAYOUT.decode_ops(of_twin(fmt), step(2_047), 0, first=1)
    assert (short.link_bytes, short.run_bytes) == (2048 * token_bytes, 256 * token_bytes)
    for plain, own_bytes in ((of_twin("fp16"), 2048), (of_twin("q8_0", what_if=True), 1088)):
        *_, gather, _ = LAYOUT.decode_ops(plain, step(100_000), 0, first=1)
        assert (gather.kernel, gather.run_bytes) == ("gather_host/twin/fp16", 2 * own_bytes)


@pytest.mark.parametrize("end", [1_000, 100_000])
def test_a_prefill_over_records_has_no_kernel_and_says_so(end: int) -> None:
    chunk = step(end - 512, 512)
    with pytest.raises(MissingRate, match="twin has no kernel for a prefill over q4_0 planes on the host"):
        LAYOUT.prefill_graphs(of_twin("q4_0"), chunk, 0, times=1)
    assert LAYOUT.prefill_graphs(of_twin("q4_0", what_if=True), chunk, 0, times=1)

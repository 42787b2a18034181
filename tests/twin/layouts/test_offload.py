"""offload: K, V and raw keys on the host. Published bytes by hand, gathers row by row, stages page by page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS, case, flash_next, machine, step
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.prefill import chunk_at, chunk_count, prefilled_tokens
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


def chunks(asked: Case) -> list[Step]:
    prompt = asked.question.ctx_tokens
    return [chunk_at(asked, prompt, index) for index in range(chunk_count(asked, prompt))]


def staged(asked: Case, chunk: Step) -> OpGraph:
    *_, block = LAYOUT.prefill_graphs(asked, chunk, 0, times=1)
    return block


@pytest.mark.parametrize(("pooled", "vram", "host"), [("vram", 0.75, 27), ("host", 0, 27.75)])
def test_bytes_per_token(pooled: str, vram: float, host: float) -> None:
    """64 bytes in VRAM and 2,304 on the host a layer: 0.75 and 27.00 KiB over 12."""
    placed = LAYOUT.placement(flash_next(pooled=pooled))
    assert (12 * placed.vram_bytes, 12 * placed.host_bytes) == (vram * 1024, host * 1024)


@pytest.mark.parametrize(
    ("asked", "buffers"),
    [({}, 1), ({"copies": "overlapped"}, 2), ({"prefill": "naive"}, 0), ({"batch": 2}, 0), ({"prefill": "staged"}, 1)],
)
def test_staging_buffers_exist_where_something_is_staged(asked: dict[str, str], buffers: int) -> None:
    assert sum(LAYOUT.working_bytes(flash_next(**asked)).values()) == buffers * 32 * MIB


def test_a_long_step_gathers_the_selection_over_the_link_and_writes_one_token() -> None:
    scan, select, gather, write = LAYOUT.decode_ops(flash_next(), step(1_048_319), 0, first=1)
    assert (gather.engine, gather.link_bytes, gather.run_bytes) == (Engine.H2D, 2048 * 2048, 4096)
    assert 12 * gather.link_bytes == 48 * MIB
    assert (write.engine, write.link_bytes) == (Engine.D2H, 2304)
    assert (scan.engine, scan.link_bytes, select.link_bytes) == (Engine.SM, 0, 0)
    assert [op.after for op in (scan, select, gather, write)] == [(0,), (1,), (2,), (0,)]


@pytest.mark.parametrize(("rows", "batch"), [(16, 1), (16, 3), (5, 2)])
def test_a_chunk_writes_every_row_of_every_sequence_to_the_host(rows: int, batch: int) -> None:
    """A row of the toy model: K and V of 2 heads x 8 and a raw key of 4, in fp16."""
    (write,) = LAYOUT.prefill_graphs(case(), step(0, rows, batch=batch), 0, times=1)[0].ops
    assert (write.engine, write.link_bytes) == (Engine.D2H, rows * batch * (64 + 8))


def test_a_short_step_reads_the_whole_cache_over_the_link() -> None:
    gather, write = LAYOUT.decode_ops(flash_next(), step(2050), 0, first=1)
    assert (gather.link_bytes, gather.run_bytes) == (2051 * 2048, 262_144)
    assert gather.after == write.after == (0,)


@pytest.mark.parametrize(("asked", "kernel"), [({}, "gather_host"), ({"host_pages": "4KiB"}, "gather_host_4k")])
def test_small_host_pages_have_a_gather_rate_of_their_own(asked: dict[str, str], kernel: str) -> None:
    *_, gather, _ = LAYOUT.decode_ops(flash_next(**asked), step(99_999), 0, first=1)
    assert gather.kernel == f"{kernel}/exllamav3/fp16"


@pytest.mark.parametrize(
    ("past", "rows", "batch", "is_staged"),
    [
        (2048, 2048, 1, True),
        (2048, 2048, 2, False),
        (8320 * 256 - 2048, 2048, 1, False),  # 2,048 x 2,080 = 2 x 8,320 x 256: no longer more than twice the pages
        (8319 * 256 - 2048, 2048, 1, True),
        (2048, 4, 1, True),
        (32_512, 4, 1, False),
    ],
)
def test_the_rule_stages_where_rows_would_read_more_than_twice_the_pages(
    past: int, rows: int, batch: int, is_staged: bool
) -> None:
    chunk = step(past, rows, batch=batch)
    assert LAYOUT.is_staged(flash_next(), chunk) is is_staged
    assert bool(LAYOUT.buckets(flash_next(), chunk)) is is_staged
    assert LAYOUT.is_staged(flash_next(prefill="naive"), chunk) is False


@pytest.mark.parametrize(
    ("end", "buckets"), [(4096, 1), (16_384, 1), (18_432, 2), (32_768, 2), (34_816, 3), (1_048_576, 64)]
)
def test_a_buffer_of_32_mib_holds_64_pages(end: int, buckets: int) -> None:
    assert LAYOUT.buckets(flash_next(), step(end - 2048, 2048)) == buckets


def test_a_staged_chunk_copies_all_pages_in_use_once() -> None:
    block = staged(flash_next(), step(1_000_000, 2048))
    copy, attend, combine = block.ops
    assert copy.link_bytes * copy.calls * block.iterations == pytest.approx(-(-1_002_048 // 256) * PAGE_BYTES)
    assert attend.vram_bytes == pytest.approx(copy.link_bytes * copy.calls + 2048 * 2080 * 4 * 2)  # and the index list
    assert attend.flops == 4 * 2048 * 2080 * 32 * 256  # 12 heads of a group padded to a tile of 16
    assert combine.vram_bytes == 2048 * (2 * 32 + 2 * 24) * 256 * 4
    assert (attend.after, combine.after) == ((0,), (1,))


@pytest.mark.parametrize(("copies", "buffer"), [("serial", Carried(0, 2, 1)), ("overlapped", Carried(0, 1, 2))])
def test_a_copy_waits_for_the_buffer_that_it_fills(copies: str, buffer: Carried) -> None:
    block = staged(flash_next(copies=copies), step(100_000, 2048))
    assert buffer in block.carried


def test_a_kernel_never_overtakes_the_combination_of_the_bucket_before() -> None:
    """Copy 5, attend 9, combine 1, 100 buckets: bound by the kernels, 5 + 100 x 10. One bucket is not combined."""
    graph = staged(flash_next(copies="overlapped"), step(100_000, 2048))
    hundred = OpGraph(ops=graph.ops, iterations=100, carried=graph.carried)
    assert schedule((hundred,), [[5.0, 9.0, 1.0]]).total_s == pytest.approx(1005)
    one = staged(flash_next(), step(2048, 2048))
    assert (one.iterations, len(one.ops)) == (1, 2)


def test_staged_bytes_of_a_prompt_of_60_000_tokens() -> None:
    """59,999 tokens are prefilled; 29 of 30 chunks are sparse, with 3,707 pages; each layer copies each page."""
    asked = flash_next(60_000)
    sparse = [chunk for chunk in chunks(asked) if is_sparse(asked.model, chunk.end)]
    pages = sum(-(-chunk.end // 256) for chunk in sparse)
    assert (prefilled_tokens(asked, 60_000), len(chunks(asked)), len(sparse), pages) == (59_999, 30, 29, 3_707)
    breakdown = prefill_breakdown(asked, Roofs(machine()))
    assert breakdown.link_bytes == pytest.approx(12 * pages * 524_288, rel=1e-12)
    assert breakdown.link_write_bytes == pytest.approx(12 * 59_999 * 2304, rel=1e-12)


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
@given(
    st.integers(min_value=0, max_value=4000),
    st.integers(min_value=1, max_value=600),
    st.integers(min_value=1, max_value=3),
)
def test_naive_bytes_are_those_of_every_row(past: int, rows: int, batch: int) -> None:
    chunk = step(past, rows, batch=batch)
    assert naive_read_bytes(flash_next(), chunk) == row_by_row(flash_next(), chunk)
    assert naive_read_bytes(case(), chunk) == row_by_row(case(), chunk)


@pytest.mark.parametrize("prompt", [2052, 6001])
def test_naive_bytes_of_short_prompts(prompt: int) -> None:
    """Dense chunks read all that lies before them; tokens of sparse chunks read their own selection."""
    asked = flash_next(prompt, prefill="naive")
    expected = 0
    for chunk in chunks(asked):
        sparse = is_sparse(asked.model, chunk.end)
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
    return resolve(
        Question(ctx_tokens=100_000, model="qwen3.8-flash-next", engine="twin", layout="offload", kv_dtype=fmt, **asked)
    )


@pytest.mark.parametrize(
    ("fmt", "token_bytes"),
    [("int8_per_token_head", 1040), ("int4_per_token_head", 528), ("q8_0", 1088), ("q4_0", 576), ("exl3_k4v4", 576)],
)
def test_a_block_in_records_is_one_run_of_k_and_v(fmt: str, token_bytes: int) -> None:
    *_, gather, write = LAYOUT.decode_ops(of_twin(fmt), step(100_002), 0, first=1)
    assert gather.kernel == f"gather_host/twin/{fmt}"
    assert (gather.link_bytes, gather.run_bytes) == ((2048 + 3) * token_bytes, 4 * token_bytes)
    assert write.link_bytes == token_bytes + 256
    short, _ = LAYOUT.decode_ops(of_twin(fmt), step(2_047), 0, first=1)
    assert (short.link_bytes, short.run_bytes) == (2048 * token_bytes, 256 * token_bytes)


def test_plain_planes_and_what_is_borrowed_are_read_k_and_v_apart() -> None:
    for asked, token_bytes in ((of_twin("fp16"), 2048), (of_twin("q8_0", what_if=True), 1088)):
        *_, gather, _ = LAYOUT.decode_ops(asked, step(100_000), 0, first=1)
        assert gather.kernel == "gather_host/twin/fp16"
        assert gather.run_bytes == 2 * token_bytes


@pytest.mark.parametrize("end", [1_000, 100_000])
def test_a_prefill_over_records_has_no_kernel_and_says_so(end: int) -> None:
    chunk = step(end - 512, 512)
    with pytest.raises(MissingRate, match="twin has no kernel for a prefill over q4_0 planes on the host"):
        LAYOUT.prefill_graphs(of_twin("q4_0"), chunk, 0, times=1)
    assert LAYOUT.prefill_graphs(of_twin("q4_0", what_if=True), chunk, 0, times=1)

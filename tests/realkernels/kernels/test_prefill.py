"""Attention of a chunk by kv chunks: every row sees its own past once, whatever the chunks."""

import pytest
import torch

from realkernels.caches.paged import PagedCache
from realkernels.codecs import codec_named
from realkernels.kernels.prefill import (
    ChunkScratch,
    attend_chunk,
    calls_of,
    check_chunk,
    combine,
    combine_in_torch,
    kv_chunks,
    reference_dequantiser,
    softmax_chunk,
)
from realkernels.shape import AttentionShape
from realkernels.timed.call import relative_error

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=6, kv_heads=2, head_dim=32)
SIZES = ((0, 1), (0, 1_100), (500, 600), (512, 512), (511, 513), (1_000, 1), (1_090, 10), (0, 512))
"""Past and new tokens."""


@pytest.fixture(scope="module")
def pool() -> PagedCache:
    return PagedCache.fill(codec_named("q8_0"), SHAPE, sequences=2, tokens=1_100, device=CPU)


def scratch(rows: int, *, chunk: int = 512, dtype: torch.dtype = torch.float32) -> ChunkScratch:
    made = ChunkScratch.allocate(
        kv_chunk_tokens=chunk, q_tokens=rows, query_heads=6, kv_heads=2, head_dim=32, dtype=dtype, device=CPU
    )  # fmt: skip
    for part in vars(made).values():
        part.fill_(float("nan"))
    return made


def attended(pool: PagedCache, past: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.randn(rows, 6, 32)
    out = torch.full_like(query, float("nan"))
    dequantise = reference_dequantiser(pool.codec, pool.planes)
    attend_chunk(query, dequantise, pool.table[1], out, scratch(rows), past_tokens=past)
    return query, out


@pytest.mark.parametrize(("past", "rows"), SIZES)
@pytest.mark.parametrize("one", [combine, combine_in_torch])
def test_it_is_attention_over_the_dequantised_cache(
    monkeypatch: pytest.MonkeyPatch, pool: PagedCache, past: int, rows: int, one: object
) -> None:
    monkeypatch.setattr("realkernels.kernels.prefill.combine_in_torch", one)
    query, out = attended(pool, past, rows)
    for row in {0, rows // 2, rows - 1}:
        for kv_head, heads in ((0, slice(0, 3)), (1, slice(3, 6))):
            truth = pool.attend(query[row, heads], 1, kv_head, seen=past + row + 1)
            assert relative_error(out[row, heads], truth) < 1e-5


@pytest.mark.parametrize(("past", "rows"), [*SIZES, (7, 3), (1_023, 1_026)])
@pytest.mark.parametrize("chunk", [128, 512, 4_096])
def test_every_row_sees_each_token_up_to_its_own_once(past: int, rows: int, chunk: int) -> None:
    seen = torch.zeros(rows, past + rows, dtype=torch.int32)
    ended = torch.zeros(rows, dtype=torch.int32)
    for first, last in kv_chunks(past + rows, chunk):
        for call in calls_of(first, last, past_tokens=past, q_tokens=rows):
            part = torch.ones(call.q_to - call.q_from, last - first, dtype=torch.int32)
            if call.causal:
                part = part.tril(part.shape[1] - part.shape[0])
                ended[call.q_from : call.q_to] += 1
            seen[call.q_from : call.q_to, first:last] += part
    assert torch.equal(seen, torch.ones_like(seen).tril(past))
    assert bool((ended == 1).all())


def test_products_that_are_masked_out_are_few() -> None:
    """Those above the diagonal of squares of at most a kv chunk; none behind whole ones."""
    past, rows, chunk = 65_536, 2_048, 8_192
    made = sum(
        (call.q_to - call.q_from) * (last - first)
        for first, last in kv_chunks(past + rows, chunk)
        for call in calls_of(first, last, past_tokens=past, q_tokens=rows)
    )
    assert made == rows * past + rows * rows


def test_the_scratch_does_not_grow_with_the_context(pool: PagedCache) -> None:
    assert scratch(16).bytes == 2 * 512 * 2 * 32 * 4 + 16 * 6 * (32 + 1) * 4
    made = scratch(10)
    for past in (0, 1_090):
        query = torch.randn(10, 6, 32)
        out = torch.empty_like(query)
        attend_chunk(query, reference_dequantiser(pool.codec, pool.planes), pool.table[0], out, made, past_tokens=past)
        assert bool(out.isfinite().all())


def test_combining_in_any_order_gives_the_whole() -> None:
    query, keys, values = torch.randn(5, 6, 32), torch.randn(96, 2, 32), torch.randn(96, 2, 32)
    keys[40] *= 30  # one token outweighs the others
    whole, _ = softmax_chunk(query, keys, values, causal=False)
    for one in (combine, combine_in_torch):
        room, out = scratch(5), torch.full_like(query, float("nan"))
        for number, first in enumerate((64, 0, 32)):
            part, lse = softmax_chunk(query, keys[first : first + 32], values[first : first + 32], causal=False)
            one(part, lse, room.total, room.weight, out, first=number == 0, last=number == 2)
        assert relative_error(out, whole.double()) < 1e-5


def test_nothing_is_launched_where_sizes_do_not_fit(pool: PagedCache) -> None:
    def dequantise(*_given: object, **_named: object) -> None:
        raise AssertionError("launched")

    query = torch.randn(4, 6, 32)
    for wrong, words in (
        ({"past_tokens": -1}, "no negative past"),
        ({"scratch": scratch(3)}, "does not take 4 tokens"),
        ({"scratch": scratch(4, dtype=torch.float16)}, "does not take kv chunks"),
        ({"out": torch.empty(3, 6, 32)}, "is not dense as query"),
        ({"out": torch.empty(4, 6, 32, dtype=torch.float16)}, "is not dense as query"),
        ({"query": torch.empty(4, 5, 32), "out": torch.empty(4, 5, 32)}, "does not take 4 tokens of 5"),
    ):
        given = {"query": query, "out": torch.empty_like(query), "scratch": scratch(4), "past_tokens": 10} | wrong
        with pytest.raises(ValueError, match=words):
            attend_chunk(dequantise=dequantise, table=pool.table[0], **given)


def test_a_chunk_is_checked_against_its_pages(pool: PagedCache) -> None:
    given = {"q_tokens": 5, "ctx_tokens": 1_100, "kv_chunk_tokens": 512}
    table = pool.table[0].clone()
    check_chunk(pool.codec, pool.planes, table, **given)
    for wrong, words in (
        ({"q_tokens": 1_101}, "1101 new tokens do not end a context of 1100"),
        ({"q_tokens": 0}, "0 new tokens"),
        ({"kv_chunk_tokens": 500}, "no multiple of a page of 256"),
        ({"kv_chunk_tokens": 0}, "no multiple"),
        ({"ctx_tokens": 10**6}, "holds 0 to"),
    ):
        with pytest.raises(ValueError, match=words):
            check_chunk(pool.codec, pool.planes, table, **given | wrong)
    table[3] = pool.planes.pages
    with pytest.raises(ValueError, match=f"page {pool.planes.pages} of sequence 0 is out of range"):
        check_chunk(pool.codec, pool.planes, table, **given)


def test_parts_of_other_sizes_are_refused() -> None:
    room = scratch(4)
    part, out = torch.zeros(4, 6, 32), torch.zeros(4, 6, 32)
    with pytest.raises(ValueError, match="do not belong together"):
        combine(part, torch.zeros(4, 6), room.total, room.weight, out, first=True, last=True)
    with pytest.raises(ValueError, match="dense"):
        combine(part, torch.zeros(4, 6).T, room.total, room.weight, out, first=True, last=True)

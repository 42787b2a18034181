"""Attention over quantised caches as it is timed: right for every format and processor; wrong results are noticed."""

import pytest
import torch

from realkernels.caches import paged
from realkernels.caches.paged import NoKernel, PagedCache
from realkernels.codecs import codec_named, default_arrangement
from realkernels.shape import AttentionShape
from realkernels.timed import attend_decode
from realkernels.timed.attend_decode import AttendDecode, caches_beyond

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=64)
FORMATS = attend_decode.attended()
RIGHT = 1e-5
"""Largest relative error of float32 attention against float64."""

INTERPRETED = 2e-2


def decode(name: str, ctx: int, *, batch: int = 1, tokens: int = 1, caches: int = 1, **given: object) -> AttendDecode:
    return AttendDecode(
        name, shape=SHAPE, batch=batch, ctx_tokens=ctx, q_tokens=tokens, caches=caches, device=CPU, **given
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("ctx", "batch", "tokens"), [(1, 1, 1), (127, 1, 2), (128, 2, 1), (257, 1, 5), (300, 3, 1)])
def test_attention_is_that_over_the_dequantised_cache(name: str, ctx: int, batch: int, tokens: int) -> None:
    assert decode(name, ctx, batch=batch, tokens=tokens, caches=2).verify() < RIGHT


def test_rotations_are_part_of_a_call_and_of_no_other_format() -> None:
    rotated = {name: decode(name, 16).rotates for name in FORMATS}
    both = {name for name in FORMATS if name.startswith(("int4", "exl3", "kvarn"))}
    assert {name for name, sides in rotated.items() if sides == "queries and outputs"} == both
    assert {name for name, sides in rotated.items() if sides == "queries"} == {"turboquant_4bit_nc"}


def test_own_kernels_read_the_aligned_arrangement_where_there_is_one() -> None:
    assert default_arrangement("int8_per_token_head") == "aligned"
    assert decode("int8_per_token_head", 16).codec.arrangement == "aligned"


def test_a_stale_output_is_wrong() -> None:
    timed = decode("q8_0", 130)
    assert timed.verify() < RIGHT
    timed.query.normal_()
    assert timed.error() > INTERPRETED
    timed.poison()
    assert timed.error() == float("inf")
    assert not timed.finite()


def test_a_call_that_reads_other_pages_is_wrong() -> None:
    timed = decode("bf16", 3 * paged.PAGE_TOKENS)
    timed.poison()
    timed.run()
    timed.cache.table.copy_(timed.cache.table.roll(1, dims=1))
    assert timed.error() > INTERPRETED


def test_a_run_reads_every_cache_and_is_checked_on_the_last() -> None:
    timed = decode("bf16", 40, batch=2, caches=3)
    assert timed.cache.table.shape[0] == 6
    last = timed.cache.slots(5, 0, 40)
    timed.poison()
    timed.run()
    assert timed.error() < RIGHT
    page, offset = last // paged.PAGE_TOKENS, last % paged.PAGE_TOKENS
    timed.cache.planes.parts["value_data"].transpose(1, 2)[page, offset] = 7.0
    timed.run()
    assert torch.allclose(timed.output[1], torch.full_like(timed.output[1], 7.0))


def test_caches_go_beyond_what_a_device_keeps() -> None:
    cuda = torch.device("cuda")
    assert caches_beyond(2**30, cuda) == 1
    assert caches_beyond(2**26, cuda) == 8
    assert caches_beyond(2**20, cuda) == attend_decode.MOST_CACHES["cuda"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_slot_of_a_pool_holds_finite_tokens_on_shuffled_pages(name: str) -> None:
    """Rows of the page table are padded, so that kernels are compiled once; some channels of K are much larger."""
    pool = PagedCache.fill(codec_named(name), SHAPE, sequences=3, tokens=600, device=CPU)
    assert pool.table.shape[1] % paged.TABLE_PAGES == 0
    used = pool.table[:, : -(-600 // paged.PAGE_TOKENS)].flatten()
    assert sorted(used.tolist()) == list(range(used.numel()))
    assert used.tolist() != list(range(used.numel()))
    for sequence in range(3):
        keys, values = pool.codec.restore(pool.planes, pool.slots(sequence, 0, 600))
        assert bool(keys.isfinite().all() and values.isfinite().all())
        if name == "bf16":
            assert int((keys.std(dim=(0, 1)) > 4).sum()) == len(paged.OUTLIERS)
            assert float(values.std(dim=(0, 1)).max()) < 2


def test_query_tokens_end_the_context() -> None:
    with pytest.raises(ValueError, match="9 new tokens do not end a context of 8"):
        decode("bf16", 8, tokens=9)


# The fused kernels, through Triton's interpreter


@pytest.mark.parametrize(("name", "tokens"), [("bf16", 2), ("int4_per_token_head", 9), ("kvarn_k4v2_g128", 2)])
def test_fused_kernels_agree(name: str, tokens: int) -> None:
    timed = decode(name, 150, batch=2, tokens=tokens, caches=2)
    timed._attend = attend_decode.attentions(timed.cache, [range(2), range(2, 4)], q_tokens=tokens)
    assert timed.verify() < INTERPRETED


def test_a_format_without_a_kernel_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no fused kernel reads exl3_k2v2" in attend_decode.missing(codec_named("exl3_k2v2"), CPU)
    with pytest.raises(NoKernel, match="no fused kernel reads fp32"):
        AttendDecode("fp32", ctx_tokens=8, device=torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    assert attend_decode.missing(codec_named("fp8"), torch.device("cuda")).endswith("8.9, this device has 8.6")


def test_what_one_call_moves_and_computes() -> None:
    timed = decode("q8_0", 300, batch=3, tokens=2, caches=2)
    assert (timed.calls, timed.moved_bytes) == (2, 300 * 3 * 2 * 2 * 68)
    assert timed.flops == 4 * 4 * 64 * 3 * (300 + 299)

"""Prefill over quantised caches as it is timed: right for every codec; wrong and stale results are noticed."""

import pytest
import torch

from realkernels.kernels.dequantise import dequantiser
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import attended
from realkernels.timed.prefill import AttendChunk, Dequantise

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=64)
RIGHT = 1e-5


def chunk(name: str, q_tokens: int, ctx_tokens: int, **given: object) -> AttendChunk:
    sizes = {"kv_chunk_tokens": 256, "caches": 1} | given
    return AttendChunk(name, shape=SHAPE, q_tokens=q_tokens, ctx_tokens=ctx_tokens, device=CPU, **sizes)


def dequantise(name: str, tokens: int) -> Dequantise:
    return Dequantise(name, shape=SHAPE, tokens=tokens, kv_chunk_tokens=256, device=CPU)


@pytest.mark.parametrize("name", attended())
@pytest.mark.parametrize(("q_tokens", "ctx_tokens"), [(5, 300), (200, 620)])
def test_attention_is_that_over_the_dequantised_cache(name: str, q_tokens: int, ctx_tokens: int) -> None:
    assert chunk(name, q_tokens, ctx_tokens, caches=2 if q_tokens == 5 else 1).verify() < RIGHT


@pytest.mark.parametrize("name", ["bf16", "int4_per_token_head", "kvarn_k4v4_g128"])
def test_the_kernel_takes_the_place_of_the_reference(name: str) -> None:
    timed = chunk(name, 30, 300)
    timed._dequantise = dequantiser(timed.codec, timed.cache.planes)
    assert timed.verify() < RIGHT
    alone = dequantise(name, 300)
    alone._dequantise = dequantiser(alone.codec, alone.cache.planes)
    assert alone.verify() == 0
    alone.poison()
    alone.run()
    assert alone.finite()
    assert alone.error() == 0


def test_numbers_that_are_not_those_of_the_reference_are_counted() -> None:
    timed = dequantise("q8_0", 300)
    inner = timed._dequantise

    def other(table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int, last: int) -> None:
        inner(table, keys, values, first=first, last=last)
        keys[: 32 if first == 0 else 11] += 1.0

    timed._dequantise = other
    assert timed.verify() == pytest.approx(11 / 88)  # the last kv chunk has 44 tokens
    timed.poison()
    assert not timed.finite()
    assert timed.error() == 1


def test_a_stale_output_is_wrong() -> None:
    timed = chunk("bf16", 3, 40)
    assert timed.verify() < RIGHT
    timed.query.normal_()
    assert timed.error() > 0.01
    timed.poison()
    assert timed.error() == float("inf")
    assert not timed.finite()


def test_bytes_and_operations_are_counted_exactly() -> None:
    timed = chunk("q8_0", 3, 300, caches=2)
    assert timed.calls == 2
    assert timed.cache_bytes == 300 * 2 * 2 * 2 * 34
    assert timed.moved_bytes == dequantise("q8_0", 300).moved_bytes == timed.cache_bytes + 300 * 2 * 2 * 64 * 4
    assert timed.flops == 4 * 4 * 64 * (298 + 299 + 300)


def test_nothing_is_written_beyond_the_last_token() -> None:
    timed = dequantise("bf16", 40)
    timed.poison()
    timed.run()
    assert bool(timed.keys[:40].isfinite().all())
    assert bool(timed.keys[40:].isnan().all())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="9 new tokens do not end a context of 8"):
        chunk("bf16", 9, 8)
    with pytest.raises(ValueError, match="no multiple of a page"):
        chunk("bf16", 1, 8, kv_chunk_tokens=100)

"""Planes that are joined in every pass, by hand: two of 16 bytes a token and layer."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.worlds import model, step
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.formats import kv_format
from twin.models.mixers import Attention
from twin.operations import tensor_cache

PLANES = 2 * 2 * 64 * 2  # bytes of K and V of one token: two heads of 64 in 16 bits
INT4 = 2 * 2 * (64 // 2 + 4)


def case(fmt: str = "bf16", *, window: int = 0, **asked: Any) -> Case:
    whole = resolve(Question(ctx_tokens=100, model="qwen3-8b", engine="transformers", kv_dtype=fmt, **asked))
    attention = Attention(query_heads=4, kv_heads=2, head_dim=64, window=window)
    return replace(whole, model=model(sparse=False, every=1), mixer=attention)


def moved(case: Case, kv_tokens: int, q_tokens: int = 1, **how: Any) -> list[tuple[str, float]]:
    ops = tensor_cache.decode_ops(case, step(kv_tokens, q_tokens), 0, first=1, **how)
    assert [op.after for op in ops] == [(at,) for at in range(len(ops))]
    return [(op.part, op.vram_bytes) for op in ops]


def test_planes_that_grow_are_read_and_written_before_they_are_read() -> None:
    assert moved(case(), 99) == [("append", 2 * 100 * PLANES), ("attention", 100 * PLANES)]


def test_planes_taken_at_once_have_their_new_token_written() -> None:
    assert moved(case(), 99, grows=False) == [("append", 2 * PLANES), ("attention", 100 * PLANES)]


def test_quantised_planes_are_dequantised_whole_and_quantised_again_every_128_tokens() -> None:
    again = 100 * (PLANES + INT4) / 128
    found = moved(case("int4_g64"), 99)
    assert found == [
        ("dequantise", 99 * (INT4 + PLANES)),
        ("append", 2 * 100 * PLANES + again),
        ("attention", 100 * PLANES),
    ]
    kernels = [op.kernel for op in tensor_cache.decode_ops(case("int4_g64"), step(99), 0, first=1)]
    assert kernels == ["dequantise/sdpa/int4_g64", "", "attend_decode/sdpa/bf16"]


def test_windows_are_never_quantised() -> None:
    assert moved(case("int4_g64", window=100), 99) == moved(case(window=100), 99)


def test_a_whole_prompt_is_attended_to_as_it_comes_and_quantised_once() -> None:
    plain, quantised = (tensor_cache.prefill_graph(case(fmt), step(0, 256), 0, times=3) for fmt in ("bf16", "int4_g64"))
    assert [op.part for op in plain.ops] == [op.part for op in quantised.ops] == ["append", "attention"]
    assert (plain.times, plain.ops[1].kernel) == (3, "attend_dense/sdpa/bf16")
    assert plain.ops[1] == quantised.ops[1]
    assert quantised.ops[0].vram_bytes - plain.ops[0].vram_bytes == 256 * (PLANES + INT4)


@pytest.mark.parametrize(("fmt", "copies"), [("bf16", 0.5), ("int4_g64", 2)])
def test_joining_takes_old_keys_beside_new_ones_and_quantised_planes_twice_both_in_16_bits(
    fmt: str, copies: float
) -> None:
    assert kv_format(fmt).name == fmt
    assert tensor_cache.working_bytes(case(fmt, batch=3)) == {"joined planes": copies * 100 * PLANES * 3}

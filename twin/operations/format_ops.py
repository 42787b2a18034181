"""Ops of single attention kernels of this project over a format's cache, counted as whole predictions count them."""

from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.operations.attention import append, decode_attention, dequantised_ops
from twin.operations.ops import Op, Step

MODEL = "qwen3.8-27b"  # 24 query heads, 4 KV heads x 256, all tokens read: the shape of all format cases on a GPU

INLINE_BACKEND = "twin_inline"


class Heads(NamedTuple):
    """Of one attention layer."""

    query_heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256


@cache
def format_case(name: str, *, inline: bool = False, heads: Heads | None = None) -> Case:
    """A cache of the format, read by this project's kernels; `inline` where that is not the default arrangement."""
    backend = INLINE_BACKEND if inline else "twin"
    case = resolve(Question(ctx_tokens=1, model=MODEL, engine="twin", layout="vram", kv_dtype=name, backend=backend))
    return case.of(replace(case.attention, **(heads._asdict() if heads else {})))


def decode_op(case: Case, *, ctx_tokens: int, batch: int, query_tokens: int) -> Op:
    """Attention of one layer for the newest `query_tokens` of `batch` sequences of `ctx_tokens`, those included."""
    step = Step(kv_tokens=ctx_tokens - query_tokens, q_tokens=query_tokens, batch=batch)
    return decode_attention(case, step, 0, after=())


def append_op(case: Case, *, tokens: int) -> Op:
    """Writing K and V of `tokens` tokens in one layer."""
    return append(case, Step(kv_tokens=0, q_tokens=tokens), 0)


def prefill_ops(case: Case, *, ctx_tokens: int, rows: int) -> tuple[Op, ...]:
    """Attention of one layer for the newest `rows` tokens of a sequence of `ctx_tokens`, those included: a chain."""
    return dequantised_ops(case, Step(kv_tokens=ctx_tokens - rows, q_tokens=rows), 0)

"""Ops of attention over a format's cache and of appending to it, counted as whole predictions count them."""

from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.layouts.layout import Pass
from twin.operations.attention import append, dense_read
from twin.operations.dequantise import expanded_ops
from twin.operations.ops import Op

MODEL = "qwen3.8-27b"
"""24 query heads, 4 KV heads x 256, all tokens read: the shape of all format cases on a GPU."""

INLINE_BACKEND = "twin_inline"


class Heads(NamedTuple):
    """Of one attention layer."""

    query_heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256


def heads_of(words: str) -> Heads:
    """Of "24x4x256"; those of the model for an empty string."""
    return Heads(*(int(word) for word in words.split("x"))) if words else Heads()


@cache
def format_case(name: str, *, inline: bool = False, heads: Heads | None = None) -> Case:
    """A cache of the format, read by this project's kernels; `inline` where that is not the default arrangement."""
    backend = INLINE_BACKEND if inline else "twin"
    asked = Question(ctx_tokens=1, model=MODEL, engine="twin", layout="vram", kv_dtype=name, backend=backend)
    case = resolve(asked)
    if heads is None:
        return case
    attention = replace(case.model.attention, **heads._asdict())
    return replace(case, model=replace(case.model, attention=attention))


def decode_op(case: Case, *, ctx_tokens: int, batch: int, query_tokens: int) -> Op:
    """Attention of one layer for the newest `query_tokens` of `batch` sequences of `ctx_tokens`, those included."""
    return dense_read(case, Pass(past=ctx_tokens - query_tokens, rows=query_tokens, batch=batch), 0, after=())


def append_op(case: Case, *, tokens: int) -> Op:
    """Writing K and V of `tokens` tokens in one layer."""
    return append(case, Pass(past=0, rows=tokens), 0)


def prefill_ops(case: Case, *, ctx_tokens: int, rows: int) -> tuple[Op, ...]:
    """Attention of one layer for the newest `rows` tokens of a sequence of `ctx_tokens`, those included: a chain."""
    return expanded_ops(case, Pass(past=ctx_tokens - rows, rows=rows), 0)

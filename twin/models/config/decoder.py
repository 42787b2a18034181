"""A decoder of the common kind, and the ways in which architectures differ from Llama: one `Style` each."""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from twin.models.config.blocks import CTX, heads_of, hidden_of, layers_of, predicting, qkv_bias, shape_of, width_of
from twin.models.config.shape import Reader, Shape
from twin.models.config.windows import Windows, unlimited
from twin.models.fields import Fields
from twin.models.mixers import Attention
from twin.models.spec import FeedForward, Layer

Said = bool | tuple[str, bool]
"""Whether something is there: always, never, or as a key says, with its default."""

Feeds = Callable[[Fields, int, int], list[FeedForward | None]]
"""From the fields, the width of the hidden state and the number of layers to what each layer feeds forward."""

ATTENTION_BIAS: Said = ("attention_bias", False)
MLP_BIAS: Said = ("mlp_bias", False)


def said(fields: Fields, flag: Said) -> bool:
    """What the file says of it."""
    return flag if isinstance(flag, bool) else fields.flag(flag[0], default=flag[1])


def head_norms(attention: Attention) -> int:
    """One norm that all query heads share and one that all key heads do."""
    return 2 * attention.head_dim


def wide_norms(attention: Attention) -> int:
    """Norms over the queries of all heads and over the keys of all heads."""
    return (attention.query_heads + attention.kv_heads) * attention.head_dim


def dense_feeds(*, gated: bool = True, bias: Said = False, key: str = "intermediate_size", scalars: int = 0) -> Feeds:
    """The same MLP in every layer; scalars: learned numbers of its activation."""

    def feeds(fields: Fields, hidden: int, layers: int) -> list[FeedForward | None]:
        mlp = mlp_of(fields, hidden, key, gated=gated, bias=bias)
        return [replace(mlp, vectors=mlp.vectors + scalars)] * layers

    return feeds


def mlp_of(fields: Fields, hidden: int, *keys: str, gated: bool = True, bias: Said = False) -> FeedForward:
    """An MLP as wide as the first of the keys that is there says, else `intermediate_size`."""
    intermediate = width_of(fields, *keys)
    vectors = mlp_bias(hidden, intermediate, gated=gated) if said(fields, bias) else 0
    return FeedForward(intermediate=intermediate, gated=gated, vectors=vectors)


def mlp_bias(hidden: int, intermediate: int, *, gated: bool = True) -> int:
    """Elements of the biases of an MLP's matrices."""
    return (2 if gated else 1) * intermediate + hidden


class Style(Struct, frozen=True, kw_only=True):
    """How a decoder differs from Llama."""

    qkv_bias: Said = False
    out_bias: Said = False
    head_bias: Said = False
    qk_norms: Callable[[Attention], int] | None = None
    qk_norms_if: Said = True
    norms: int = 2  # vectors of the hidden width in a layer; a LayerNorm has two, its weight and its bias
    more_norms: int = 0  # that are there where a key says so
    more_norms_if: Said = False
    last_norms: int = 1  # after the last layer
    output_gate: bool = False
    sinks: bool = False  # one for each query head
    tied: bool = False  # where the file does not say
    head_dim: int | None = None  # where the file does not say; None: the hidden width over the heads
    windows: Windows = unlimited
    feeds: Feeds = dense_feeds()
    predicts: bool = False  # layers more than the model has, for tokens further on


BIASED = Style(qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS)
"""Biases on all four matrices of attention where attention_bias says so."""


def decoder(style: Style) -> Reader:
    """The reader of decoders of that style."""

    def read(fields: Fields) -> Shape:
        hidden, layers = hidden_of(fields), layers_of(fields)
        attention = attention_of(fields, hidden, style)
        fields.without_effect(*CTX)  # one of several spellings is read below
        ctx = fields.integer(*CTX)
        norms = (style.norms + (style.more_norms if said(fields, style.more_norms_if) else 0)) * hidden
        # a window that holds the whole context is none
        windows = [window if window < ctx else 0 for window in style.windows(fields, layers)]
        stack = [
            Layer(mixers=(replace(attention, window=window),), feed_forward=feed, vectors=norms)
            for window, feed in zip(windows, style.feeds(fields, hidden, layers), strict=True)
        ]
        towers = predicting(fields, stack[-1:], hidden) if style.predicts else {}
        last = style.last_norms * hidden
        shape = shape_of(fields, stack, hidden=hidden, vectors=last, tied=style.tied, ctx=ctx, towers=towers)
        bias = shape.vocab if said(fields, style.head_bias) else 0
        return replace(shape, vectors=shape.vectors + bias)

    return read


def attention_of(fields: Fields, hidden: int, style: Style) -> Attention:
    """Full attention with the norms and biases of the style."""
    attention = heads_of(fields, hidden, head_dim_default=style.head_dim)
    vectors = qkv_bias(attention) if said(fields, style.qkv_bias) else 0
    vectors += hidden if said(fields, style.out_bias) else 0
    if style.qk_norms is not None and said(fields, style.qk_norms_if):
        vectors += style.qk_norms(attention)
    vectors += attention.query_heads if style.sinks else 0
    return replace(attention, vectors=vectors, output_gate=style.output_gate)

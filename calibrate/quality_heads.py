"""Which heads `twin quality` measures: those that were dumped into a file, or all kinds of made-up ones.

Of made-up heads two KV heads are measured, since all are alike; bytes are always counted for all of the model's. The
queries of a file are taken at places spread evenly over the second half of its tokens, and see what came before them;
made-up queries see every token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from calibrate.synthetic_heads import KINDS, QUERIES, Heads, looking_for, synthetic_heads
from calibrate.tensors_file import LEAST_TOKENS, Layer, read_layers
from twin.errors import BadFile, BadValue
from twin.models import ModelSpec

MOST_TOKENS = 2**17
"""Of made-up heads."""

MADE_UP_HEADS = 2
LEAST_PLACES = 16
"""At which a file's queries are taken."""

MOST_ELEMENTS = 2**28
"""Of K in one layer, which would be 1 GiB in float32."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Sets of heads, made or read one after the other."""

    kv_heads: int
    """Of the model or file, of which fewer may be measured."""
    head_dim: int
    makers: tuple[Callable[[], Heads], ...]
    model: ModelSpec | None
    """Whose heads they are, or are like."""


def made_up(spec: ModelSpec, tokens: int, seed: int) -> Source:
    """All kinds, in the shape of a model; BadValue for numbers of tokens out of range."""
    shape = spec.attention
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        raise BadValue(f"--tokens: {tokens:,} is outside the range of {LEAST_TOKENS} to {MOST_TOKENS:,} tokens")
    count = min(MADE_UP_HEADS, shape.kv_heads)
    _check_size(tokens, count, shape.head_dim)
    make = partial(synthetic_heads, tokens=tokens, kv_heads=count, head_dim=shape.head_dim, seed=seed)
    makers = tuple(partial(make, kind) for kind in KINDS)
    return Source(kv_heads=shape.kv_heads, head_dim=shape.head_dim, makers=makers, model=spec)


def dumped(path: Path, spec: ModelSpec | None, tokens: int | None, seed: int | None) -> Source:
    """The layers of a file; BadFile for what is wrong with it, or where `spec` has other heads."""
    layers = read_layers(path, tokens=tokens)
    kv_heads, head_dim = layers[0].keys.shape[1:]
    if spec is not None and (spec.attention.kv_heads, spec.attention.head_dim) != (kv_heads, head_dim):
        raise BadFile(
            f"{path}: tensor {layers[0].keys.name!r} has {kv_heads} heads of {head_dim}, {spec.name} has "
            f"{spec.attention.kv_heads} of {spec.attention.head_dim}"
        )
    for layer in layers:
        held = layer.keys.shape[0]
        if tokens is not None and not LEAST_TOKENS <= tokens <= held:
            raise BadValue(f"--tokens: {tokens:,} is outside the range of {LEAST_TOKENS} to the {held:,} of {path}")
        _check_size(tokens or held, kv_heads, head_dim)
    if seed is not None and all(layer.queries for layer in layers):
        raise BadValue(f"--seed means nothing where {path} holds queries")
    makers = tuple(
        partial(_layer_heads, layer, tokens or layer.keys.shape[0], [seed or 0, number])
        for number, layer in enumerate(layers)
    )
    return Source(kv_heads=kv_heads, head_dim=head_dim, makers=makers, model=spec)


def _check_size(tokens: int, kv_heads: int, head_dim: int) -> None:
    if tokens * kv_heads * head_dim > MOST_ELEMENTS:
        raise BadValue(
            f"K of {tokens:,} tokens with {kv_heads} heads of {head_dim} exceeds the {MOST_ELEMENTS:,} elements that "
            "are measured",
            hint="--tokens takes fewer",
        )


def _layer_heads(layer: Layer, tokens: int, seed: Sequence[int]) -> Heads:
    """K, V and queries of a layer: the file's own of some tokens, which see what came before, or made-up ones."""
    keys, values = layer.keys.rows(0, tokens), layer.values.rows(0, tokens)
    kv_heads, head_dim = keys.shape[1:]
    if layer.queries is None:
        queries = looking_for(np.random.default_rng(list(seed)), keys, count=QUERIES, sink_score=0.0)
        visible = np.full(QUERIES, tokens)
    else:
        group = layer.queries.shape[1] // kv_heads
        count = max(LEAST_PLACES, -(-QUERIES // group))
        places = np.unique(np.linspace(tokens // 2, tokens - 1, count).round().astype(np.int64))
        own = np.concatenate([layer.queries.rows(place, place + 1) for place in places.tolist()])
        own = own.reshape(len(places), kv_heads, group, head_dim).swapaxes(0, 1)
        queries, visible = np.ascontiguousarray(own.reshape(kv_heads, -1, head_dim)), np.repeat(places + 1, group)
    return Heads(
        name=layer.name,
        about="",
        keys=keys,
        values=values,
        queries=queries,
        visible=visible.astype(np.int64),
        generated=layer.queries is None,
    )

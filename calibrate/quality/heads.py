"""Heads to measure formats on: dumped into a file, or made up: four kinds, each with its formula, all from a seed.

Of made-up heads two KV heads are measured, since all are alike; bytes are always counted for all of the model's. The
queries of a file are taken at places spread evenly over the second half of its tokens, and see what came before them;
made-up queries see every token.

T tokens, D channels, every KV head for itself; N is a standard normal draw, another for each element.

| kind | formula |
|---|---|
| gaussian | K = N, V = N |
| outliers | in C = max(1, D / 64) random channels K = s (o + N): the same channels, s and o for all tokens, |
| | s log-uniform in 5 .. 20, o uniform in 1 .. 3 with a random sign; the other channels and V as gaussian |
| tails | K = t / sqrt(2), V = t / sqrt(2) with t of Student's distribution, 4 degrees of freedom: variance 1 |
| sinks | for the first S = 4 tokens K = 10 sqrt(D) u + N with a random direction u of the head, and V = N / 20; the |
| | other tokens as gaussian |

Outliers are what is published of keys: a few channels that are loud in every token, which values have not (KIVI, arXiv
2402.02750; KVQuant, 2401.18079). Sinks take most of the attention and hand on little (StreamingLLM, 2309.17453); that
their keys are long is the harder case for a format: models are known in which they are short (2410.10781).

A query is made so that attention has a peak. With x = (k - mean) / deviation, channel by channel over the tokens from S
on (a deviation counts as at least a tenth of their root mean square),

    q = (z + sqrt(D) sum_m l_m x[j_m] / |x[j_m]|^2) / deviation,    l_m = ln T - m,  m = 0 .. 3,

with z = N and j_m random tokens. Apart from a constant, the score q k / sqrt(D) of token i is z x_i / sqrt(D), about
N(0, 1); plus l_m where i = j_m; plus N(0, l_m^2 / D) elsewhere. So about half of the attention goes to four tokens, a
third to the first of them, and the other half is spread over all: needles in a context. Every channel has an equal part
in the scores. In `sinks` the first S tokens have the score ln T + 1/2, by the least change of q that does it, and some
60 % of the attention. In a file without queries their score is the mean one: they are neither sought nor shunned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibrate.quality.tensors_file import LEAST_TOKENS, Floats, Layer, read_layers
from twin.errors import BadFile, BadValue
from twin.models import ModelSpec
from twin.models.mixers import Attention

SINKS = 4
"""First tokens that are left out of means and deviations."""
TARGETS = 4
QUERIES = 128
"""For each KV head."""
LEAST_DEVIATION = 0.1
"""Of the root mean square over channels."""
MOST_TOKENS = 2**17
"""Of made-up heads."""
MADE_UP_HEADS = 2
LEAST_PLACES = 16
"""At which a file's queries are taken."""
MOST_ELEMENTS = 2**28
"""Of K in one layer, which would be 1 GiB in float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """K, V and queries of some KV heads."""

    name: str
    about: str
    keys: Floats
    """[tokens, kv_heads, head_dim]."""
    values: Floats
    """As keys."""
    queries: Floats
    """[kv_heads, n, head_dim]."""
    visible: npt.NDArray[np.int64]
    """[n]: how many of the first tokens each query attends to."""
    generated: bool
    """Whether the queries were made up."""


Shape = tuple[int, int, int]
"""Tokens, KV heads, channels."""


def gaussian(random: np.random.Generator, shape: Shape) -> tuple[Floats, Floats]:
    """Standard normal."""
    return random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32)


def outliers(random: np.random.Generator, shape: Shape) -> tuple[Floats, Floats]:
    """Keys with a few loud, shifted channels."""
    keys, values = gaussian(random, shape)
    _, kv_heads, head_dim = shape
    count = max(1, head_dim // 64)
    for head in range(kv_heads):
        channels = random.choice(head_dim, count, replace=False)
        scale = np.exp(random.uniform(log(5), log(20), count))
        offset = random.uniform(1, 3, count) * random.choice([-1, 1], count)
        keys[:, head, channels] = scale * (offset + keys[:, head, channels])
    return keys, values


def tails(random: np.random.Generator, shape: Shape) -> tuple[Floats, Floats]:
    """Student's t."""
    keys, values = (random.standard_t(4, shape) / sqrt(2) for _ in range(2))
    return keys.astype(np.float32), values.astype(np.float32)


def sinks(random: np.random.Generator, shape: Shape) -> tuple[Floats, Floats]:
    """First tokens with long keys and short values."""
    keys, values = gaussian(random, shape)
    direction = random.standard_normal(shape[1:])
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    keys[:SINKS] += (10 * sqrt(shape[-1]) * direction).astype(np.float32)
    values[:SINKS] /= 20
    return keys, values


KINDS: dict[str, tuple[Callable[[np.random.Generator, Shape], tuple[Floats, Floats]], str]] = {
    "outliers": (outliers, "a few channels of K are 5 to 20 times as loud as the others, and shifted"),
    "gaussian": (gaussian, "K and V are normal"),
    "tails": (tails, "K and V have heavy tails: Student's t with 4 degrees of freedom"),
    "sinks": (sinks, "the first 4 tokens have keys ten times as long, small values, and most of the attention"),
}
"""What makes K and V, and what they are like."""


def synthetic_heads(
    name: str, *, tokens: int, kv_heads: int, head_dim: int, seed: int, queries: int = QUERIES
) -> Heads:
    """Heads of one kind; the same seed gives the same ones. KeyError for another kind."""
    make, about = KINDS[name]
    random = np.random.default_rng([seed, list(KINDS).index(name)])
    keys, values = make(random, (tokens, kv_heads, head_dim))
    sink_score = log(tokens) + 0.5 if name == "sinks" else None
    sought = looking_for(random, keys, count=queries, sink_score=sink_score)
    visible = np.full(queries, tokens)
    return Heads(name=name, about=about, keys=keys, values=values, queries=sought, visible=visible, generated=True)


def looking_for(random: np.random.Generator, keys: Floats, *, count: int, sink_score: float | None) -> Floats:
    """Queries [kv_heads, count, head_dim] for keys [tokens, kv_heads, head_dim], as the module says.

    `sink_score` is that of the first S tokens above the mean one; None: whatever comes out.
    """
    heads = (keys[:, head].astype(np.float64) for head in range(keys.shape[1]))
    return np.stack([_queries_of_head(random, head, count, sink_score) for head in heads]).astype(np.float32)


def _queries_of_head(
    random: np.random.Generator, keys: npt.NDArray[np.float64], count: int, sink_score: float | None
) -> npt.NDArray[np.float64]:
    tokens, size = keys.shape
    mean, deviation = keys[SINKS:].mean(axis=0), keys[SINKS:].std(axis=0)
    deviation = np.maximum(deviation, LEAST_DEVIATION * sqrt((deviation**2).mean()))
    deviation[deviation == 0] = 1.0  # all keys are alike
    wanted = random.integers(SINKS, tokens, (count, TARGETS))
    x = (keys[wanted] - mean) / deviation
    lengths = (x**2).sum(axis=-1, keepdims=True)
    lengths[lengths == 0] = 1.0
    lifts = log(tokens) - np.arange(TARGETS)
    query = random.standard_normal((count, size)) + sqrt(size) * (lifts[:, None] * x / lengths).sum(axis=1)
    if sink_score is not None:
        first = (keys[:SINKS] - mean) / deviation
        missing = sqrt(size) * sink_score - query @ first.T
        query += missing @ np.linalg.pinv(first).T
    return np.asarray(query / deviation)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Sets of heads, made or read one after the other."""

    kv_heads: int
    """Of the model or file, of which fewer may be measured."""
    head_dim: int
    makers: tuple[Callable[[], Heads], ...]
    model: ModelSpec | None
    """Whose heads they are, or are like."""


def heads_of(spec: ModelSpec) -> Attention:
    """The attention whose heads are cached; BadValue where the model caches none."""
    if not isinstance(spec.attention, Attention):
        raise BadValue(f"{spec.name} caches no keys and values of heads")
    return spec.attention


def made_up(spec: ModelSpec, tokens: int, seed: int) -> Source:
    """All kinds, in the shape of a model; BadValue for numbers of tokens out of range."""
    shape = heads_of(spec)
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
    if spec is not None and ((own := heads_of(spec)).kv_heads, own.head_dim) != (kv_heads, head_dim):
        raise BadFile(
            f"{path}: tensor {layers[0].keys.name!r} has {kv_heads} heads of {head_dim}, {spec.name} has "
            f"{own.kv_heads} of {own.head_dim}"
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
        name=layer.name, about="", keys=keys, values=values, queries=queries, visible=visible.astype(np.int64),
        generated=layer.queries is None,
    )  # fmt: skip

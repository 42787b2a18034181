"""Keys, values and queries made up where nobody dumped real ones: four kinds, each with its formula, all from a seed.

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

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SINKS = 4
"""First tokens that are left out of means and deviations."""

TARGETS = 4
QUERIES = 128
"""For each KV head."""

LEAST_DEVIATION = 0.1
"""Of the root mean square over channels."""


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


def outliers(random: np.random.Generator, tokens: int, kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Keys with a few loud, shifted channels."""
    keys, values = gaussian(random, tokens, kv_heads, head_dim)
    count = max(1, head_dim // 64)
    for head in range(kv_heads):
        channels = random.choice(head_dim, count, replace=False)
        scale = np.exp(random.uniform(log(5), log(20), count))
        offset = random.uniform(1, 3, count) * random.choice([-1, 1], count)
        keys[:, head, channels] = scale * (offset + keys[:, head, channels])
    return keys, values


def gaussian(random: np.random.Generator, tokens: int, kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Standard normal."""
    size = (tokens, kv_heads, head_dim)
    return random.standard_normal(size, np.float32), random.standard_normal(size, np.float32)


def tails(random: np.random.Generator, tokens: int, kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Student's t."""
    keys, values = (random.standard_t(4, (tokens, kv_heads, head_dim)) / sqrt(2) for _ in range(2))
    return keys.astype(np.float32), values.astype(np.float32)


def sinks(random: np.random.Generator, tokens: int, kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """First tokens with long keys and short values."""
    keys, values = gaussian(random, tokens, kv_heads, head_dim)
    direction = random.standard_normal((kv_heads, head_dim))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    keys[:SINKS] += (10 * sqrt(head_dim) * direction).astype(np.float32)
    values[:SINKS] /= 20
    return keys, values


Maker = Callable[[np.random.Generator, int, int, int], tuple[Floats, Floats]]

KINDS: dict[str, tuple[Maker, str]] = {
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
    keys, values = make(random, tokens, kv_heads, head_dim)
    sink_score = log(tokens) + 0.5 if name == "sinks" else None
    return Heads(
        name=name,
        about=about,
        keys=keys,
        values=values,
        queries=looking_for(random, keys, count=queries, sink_score=sink_score),
        visible=np.full(queries, tokens),
        generated=True,
    )


def looking_for(random: np.random.Generator, keys: Floats, *, count: int, sink_score: float | None) -> Floats:
    """Queries [kv_heads, count, head_dim] for keys [tokens, kv_heads, head_dim], as the module says.

    `sink_score` is that of the first S tokens above the mean one; None: whatever comes out.
    """
    made = [_of_head(random, keys[:, head], count, sink_score) for head in range(keys.shape[1])]
    return np.stack(made).astype(np.float32)


def _of_head(
    random: np.random.Generator, keys: Floats, count: int, sink_score: float | None
) -> npt.NDArray[np.float64]:
    tokens, size = keys.shape
    exact = keys.astype(np.float64)
    mean, deviation = exact[SINKS:].mean(axis=0), exact[SINKS:].std(axis=0)
    deviation = np.maximum(deviation, LEAST_DEVIATION * sqrt((deviation**2).mean()))
    deviation[deviation == 0] = 1.0  # all keys are alike
    wanted = random.integers(SINKS, tokens, (count, TARGETS))
    x = (exact[wanted] - mean) / deviation
    lengths = (x**2).sum(axis=-1, keepdims=True)
    lengths[lengths == 0] = 1.0
    lifts = log(tokens) - np.arange(TARGETS)
    query = random.standard_normal((count, size)) + sqrt(size) * (lifts[:, None] * x / lengths).sum(axis=1)
    if sink_score is not None:
        first = (exact[:SINKS] - mean) / deviation
        missing = sqrt(size) * sink_score - query @ first.T
        query += missing @ np.linalg.pinv(first).T
    result: npt.NDArray[np.float64] = query / deviation
    return result

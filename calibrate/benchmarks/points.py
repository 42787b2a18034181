"""A measured point of an engine's own benchmark, and what its file says of machine, model and flags beside it."""

import math
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from hwprofiles.errors import BadFile
from twin.ask.question import MAX_BATCH
from twin.errors import BadValue
from twin.units import MAX_TOKENS

Metric = Literal["step", "prefill", "ttft", "latency", "served"]
"""A decode step, a prefill, a first token, a prefill with its decode steps, or all requests until the last is done."""

Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Nanoseconds = Annotated[float, Meta(gt=0, le=1e15)]
Milliseconds = Annotated[float, Meta(gt=0, le=1e9)]
Deviation = Annotated[float, Meta(ge=0, le=1e18)]
PerSecond = Annotated[float, Meta(gt=0, le=1e9)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Sequences = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
Times = Annotated[int, Meta(ge=1, le=10**6)]

MOST_REQUESTS = 20_000
"""Of a served workload: more would be simulated for minutes."""
MOST_SPREAD = 0.5
"""Beyond it a mean tells nothing: it is used with so much."""


class Point(Struct, frozen=True, kw_only=True):
    """One time that a benchmark measured."""

    id: str
    """File, place in it, and what was measured: the name by which a fitted rate says what it stands on."""
    metric: Metric
    seconds: float
    spread: float = 0.0
    """Relative standard deviation of the mean; 0: not told."""
    n: int = 1
    kv_tokens: int = 0
    """In the cache of each sequence before."""
    prompt_tokens: int = 0
    """Of each sequence, passed through the model; 0 where only decode steps were timed."""
    steps: int = 0
    """Decode steps that follow."""
    batch: int = 1
    requests: int = 0
    """Of a served workload; `batch` of them at once at the most, 0 for as many as the engine takes."""


class Told(Struct, frozen=True, kw_only=True):
    """What a file says beside its times; empty where it says nothing."""

    engine: str
    version: str = ""
    gpus: tuple[str, ...] = ()
    """As their driver calls them, those that were used."""
    model: str = ""
    """A name, or the path of a file."""
    kind: str = ""
    """The same in other words, such as "llama 8B Q4_K - Medium"."""
    parameters: int = 0
    weights: str = ""
    kv_dtype: str = ""
    chunk_tokens: int = 0
    flags: tuple[tuple[str, str | int], ...] = ()
    """Fields of a question that the benchmark's flags set, as it takes them."""


class Given(Struct, frozen=True, kw_only=True):
    """What options say in place of a file, or beside it; None: nothing."""

    hw: str | None = None
    model: str | None = None
    weights: str | None = None
    engine: str | None = None
    kv_dtype: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    batch: int | None = None
    chunk_tokens: int | None = None
    tp: int | None = None
    pp: int | None = None

    def check(self) -> None:
        """Raise BadValue for a number that is none of a benchmark's."""
        ranges = (
            ("--ctx", self.prompt_tokens, MAX_TOKENS),
            ("--output-tokens", self.output_tokens, MAX_TOKENS),
            ("--batch", self.batch, MAX_BATCH),
            ("--chunk", self.chunk_tokens, MAX_TOKENS),
        )
        for option, value, most in ranges:
            if value is not None and not 1 <= value <= most:
                raise BadValue(f"{option}: {value} is outside the range of 1 to {most:,}")


class Reading(NamedTuple):
    """A point with what its file says."""

    told: Told
    point: Point


class Left(NamedTuple):
    """A line that is no evidence, and why."""

    where: str
    reason: str


Read = list[Reading | Left]


def spread_of(mean: float, deviation: float, n: int) -> float:
    """Of the mean of n samples, relative."""
    return min(MOST_SPREAD, deviation / mean / math.sqrt(max(1, n)))


def needed(value: int | None, where: str, option: str, what: str) -> int:
    """A number that the file does not hold; BadFile where no option says it either."""
    if value is None:
        raise BadFile(f"{where}: does not say {what}", hint=f"{option} says it")
    return value

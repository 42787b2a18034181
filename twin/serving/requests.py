"""What a simulation is asked: requests, made-up workloads of them, and the limits of the scheduler.

Arrivals and lengths are drawn from separate streams of one seed. Nothing is listed: a workload of a billion requests is
a generator like one of ten.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from msgspec import Struct

from twin.errors import BadValue
from twin.units import MAX_TOKENS

Arrivals = Literal["poisson", "constant", "burst"]
Distribution = Literal["fixed", "uniform", "exponential", "lognormal"]

MAX_COUNT = 10**9
MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-9, 1e6
MAX_ARRIVAL_S = 1e10  # three centuries: a clock of 64 bits still tells two microseconds apart there
MAX_SEQUENCES = 65_536
MAX_SPECULATIVE = 1_024
RATIO_UNIT = 10**6  # `tokens_per_step` is kept in whole millionths, so that token counts are exact
MAX_CV = 10.0
MOST_UNIFORM_CV = 0.57  # a uniform distribution from 1 on has a cv of 1 / sqrt(3) at most


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """One request as it comes in."""

    id: str | int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[str | int, ...] = ()
    """Names of the shared start of the prompt, piece by piece; each stands for its piece and all before it."""
    prefix_tokens: int = 0  # tokens of all pieces together
    prefix_span: int = 0  # tokens of each piece but the last; 0 where there is one piece
    line: int = 0  # where it stands in its file; 0 if in none


class Lengths(Struct, frozen=True, kw_only=True):
    """Whole numbers of tokens, at least 1 each, with `mean` as their exact mean.

    `exponential` is its whole-numbered form (geometric from 1), `uniform` runs evenly to both sides of the mean,
    `lognormal` is shifted by one token and rounded up or down by chance.
    """

    mean: int
    distribution: Distribution = "fixed"
    cv: float | None = None  # standard deviation over mean, for uniform (default 0.5) and lognormal (default 1)

    def __post_init__(self) -> None:
        _in_range("the mean length", self.mean, 1, MAX_TOKENS, "tokens")
        if self.distribution not in get_args(Distribution):
            raise BadValue(f"{self.distribution!r} is no distribution", hint=f"one of {_listed(Distribution)}")
        if self.cv is None:
            return
        if self.distribution in ("fixed", "exponential"):
            raise BadValue(f"a cv of {self.cv} with {self.distribution} lengths", hint="uniform and lognormal have one")
        most = MOST_UNIFORM_CV if self.distribution == "uniform" else MAX_CV
        if not 0 < self.cv <= most:
            raise BadValue(f"the cv is {self.cv}, outside the range of 0 to {most} for {self.distribution} lengths")

    def draws(self, stream: random.Random) -> Callable[[], int]:
        """A function that draws the next length."""
        if self.distribution == "fixed" or self.mean == 1:
            return lambda: self.mean
        if self.distribution == "uniform":
            cv = 0.5 if self.cv is None else self.cv
            half = min(self.mean - 1, round(math.sqrt(0.25 + 3 * (cv * self.mean) ** 2) - 0.5))
            return lambda: stream.randint(self.mean - half, self.mean + half)
        if self.distribution == "exponential":
            per_log = 1 / math.log1p(-1 / self.mean)
            return lambda: min(MAX_TOKENS, 1 + int(math.log(1 - stream.random()) * per_log))
        over = self.mean - 1
        cv = (1.0 if self.cv is None else self.cv) * self.mean / over
        sigma = math.sqrt(math.log1p(cv * cv))
        mu = math.log(over) - sigma * sigma / 2
        return lambda: min(MAX_TOKENS, 1 + int(stream.lognormvariate(mu, sigma) + stream.random()))


class Workload(Struct, frozen=True, kw_only=True):
    """`count` requests; the first arrives at 0. Without a rate, or with an infinite one, all do."""

    count: int
    prompt: Lengths
    output: Lengths
    rate_per_s: float | None = None
    arrivals: Arrivals = "poisson"
    burstiness: float = 1.0  # shape of gamma distributed gaps, as in `vllm bench serve`: 1 is Poisson, less burstier
    prefix_tokens: int = 0  # a start that all share beside `prompt`, as `vllm bench serve --random-prefix-len`
    seed: int = 0

    def __post_init__(self) -> None:
        _in_range("the count", self.count, 1, MAX_COUNT, "requests")
        _in_range("the shared prefix", self.prefix_tokens, 0, MAX_TOKENS, "tokens")
        if type(self.seed) is not int:
            raise BadValue(f"the seed is {self.seed!r}, not a whole number")
        if self.arrivals not in get_args(Arrivals):
            raise BadValue(f"{self.arrivals!r} is no way to arrive", hint=f"one of {_listed(Arrivals)}")
        self._check_rate()
        if self.arrivals == "burst" and not self.at_once:
            raise BadValue(f"a burst has no rate, {self.rate_per_s} requests/s given", hint="all arrive at once")
        if not 1e-3 <= self.burstiness <= 1e6:
            raise BadValue(f"the burstiness is {self.burstiness}, outside the range of 0.001 to 1,000,000")
        if self.burstiness != 1 and (self.arrivals != "poisson" or self.at_once):
            raise BadValue(f"a burstiness of {self.burstiness} needs poisson arrivals at a finite rate")

    def _check_rate(self) -> None:
        rate = self.rate_per_s
        if rate is None or rate == math.inf:
            return
        if not MIN_RATE_PER_S <= rate <= MAX_RATE_PER_S:
            allowed = f"{MIN_RATE_PER_S:g} to {MAX_RATE_PER_S:,.0f} requests/s"
            hint = "inf, or no rate, for all at once"
            raise BadValue(f"the rate is {rate}, outside the range of {allowed}", hint=hint)
        if self.count / rate > MAX_ARRIVAL_S:
            taken = f"{self.count:,} requests at {rate:g} a second take {self.count / rate:.3g} s"
            hint = "fewer requests or a higher --rate"
            raise BadValue(f"{taken}, the clock ends at {MAX_ARRIVAL_S:g} s", hint=hint)

    @property
    def at_once(self) -> bool:
        """Whether all requests arrive at time 0."""
        return self.rate_per_s is None or self.rate_per_s == math.inf

    def requests(self) -> Iterator[Request]:
        """The requests in the order of their arrival: the same for the same seed on every machine."""
        prompt = self.prompt.draws(self._stream("prompts"))
        output = self.output.draws(self._stream("outputs"))
        shared = self.prefix_tokens
        prefix_ids = ("shared",) if shared else ()
        for index, arrival_s in zip(range(self.count), self.arrivals_s(), strict=False):
            tokens = {"prompt_tokens": shared + prompt(), "output_tokens": output(), "prefix_tokens": shared}
            yield Request(id=index, arrival_s=arrival_s, prefix_ids=prefix_ids, **tokens)

    def arrivals_s(self) -> Iterator[float]:
        """Times from 0 on without end: the first `count` are those of the requests."""
        gap = self._gaps()
        arrival_s = 0.0
        while True:
            yield arrival_s
            arrival_s += gap()

    def _stream(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")  # noqa: S311 - a simulation keeps no secrets

    def _gaps(self) -> Callable[[], float]:
        """A function that draws the seconds to the next arrival."""
        rate = self.rate_per_s
        if rate is None or self.at_once:
            return lambda: 0.0
        if self.arrivals == "constant":
            return lambda: 1 / rate
        stream = self._stream("arrivals")
        if self.burstiness == 1:
            return lambda: stream.expovariate(rate)
        return lambda: stream.gammavariate(self.burstiness, 1 / (rate * self.burstiness))


class Limits(Struct, frozen=True, kw_only=True):
    """The scheduler's options, named after what they limit; vLLM's own names stand beside."""

    batched_tokens: int = 2048  # query tokens of a step, decodes and chunks together (max_num_batched_tokens)
    max_sequences: int = 256  # sequences running at once (max_num_seqs)
    max_model_tokens: int | None = None  # prompt and output together; a longer request is rejected (max_model_len)
    speculative: int = 0  # draft tokens verified a step beside the certain one (num_speculative_tokens)
    tokens_per_step: float = 1.0  # mean tokens that a sequence gains in a decode step: from 1 to 1 + `speculative`
    reserve_prompt: bool = True
    """Admit a request only when its whole prompt would fit now, not merely its first chunk.

    vLLM's default (scheduler_reserve_full_isl, PR 37307); blocks are still taken chunk by chunk.
    """
    reserve_output: bool = False
    """Take the blocks of the whole output at admission: nothing is ever preempted (TensorRT-LLM's no-evict policy)."""
    prefix_cache: bool = True  # skip prompt tokens of a shared prefix that is still cached (enable_prefix_caching)

    def __post_init__(self) -> None:
        _in_range("batched_tokens", self.batched_tokens, 1, MAX_TOKENS)
        _in_range("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)
        if self.max_model_tokens is not None:
            _in_range("max_model_tokens", self.max_model_tokens, 2, MAX_TOKENS)
        _in_range("speculative", self.speculative, 0, MAX_SPECULATIVE)
        if not 1 <= self.tokens_per_step <= 1 + self.speculative:
            hint = "a step yields one token and at most one more per speculative token"
            outside = f"outside the range of 1 to {self.q_tokens}"
            raise BadValue(f"tokens_per_step is {self.tokens_per_step}, {outside}", hint=hint)
        if self.batched_tokens <= self.speculative:
            hint = f"at least {self.q_tokens} with {self.speculative} speculative tokens"
            decoded = f"one sequence decodes {self.q_tokens} tokens a step"
            raise BadValue(f"batched_tokens is {self.batched_tokens}: {decoded}", hint=hint)

    @property
    def q_tokens(self) -> int:
        """Tokens of the budget that one decoding sequence takes."""
        return 1 + self.speculative

    @property
    def most_running(self) -> int:
        """Sequences that may run at once: the budget must hold a decode of each."""
        return min(self.max_sequences, self.batched_tokens // self.q_tokens)

    @property
    def ratio(self) -> tuple[int, int]:
        """`tokens_per_step` as whole numbers: tokens and steps."""
        if self.tokens_per_step == 1:
            return 1, 1
        return round(self.tokens_per_step * RATIO_UNIT), RATIO_UNIT

    def last_slot(self, prompt_tokens: int, output_tokens: int) -> int:
        """Tokens for which a request may need blocks at once: the last token is never cached, drafts are."""
        return prompt_tokens if output_tokens == 1 else prompt_tokens + output_tokens - 1 + self.speculative


def _in_range(what: str, value: int, least: int, most: int, unit: str = "") -> None:
    if type(value) is not int or not least <= value <= most:
        raise BadValue(f"{what} is {value}, outside the range of {least:,} to {most:,} {unit}".rstrip())


def _listed(words: object) -> str:
    return ", ".join(get_args(words))

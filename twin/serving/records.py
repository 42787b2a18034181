"""What is left of a request when it is over, and of a whole simulation."""

from typing import NamedTuple

from msgspec import Struct

from twin.serving.histogram import Histogram
from twin.serving.limits import Limits


class RequestRecord(Struct, frozen=True, kw_only=True, gc=False):
    """A request that got all its tokens. Times in seconds from the start of the simulation."""

    id: str | int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens skipped at the first admission, because a shared prefix was cached."""
    queue_s: float
    """From arrival to first admission."""
    ttft_s: float
    """From arrival to the first token."""
    tpot_s: float | None
    """Mean time between tokens after the first; None of a single token."""
    e2e_s: float
    """From arrival to the last token."""
    preemptions: int


class Rejection(Struct, frozen=True, kw_only=True, gc=False):
    """A request that can never run."""

    id: str | int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    kind: str
    """`max_model_tokens` or `pool`: what it is too long for."""
    reason: str
    line: int


class Steps(NamedTuple):
    """Engine steps in a row: `steps` decode steps of one batch, or one step with prefill in it."""

    start_s: float
    end_s: float
    steps: int
    decoding: int
    """Sequences that gain tokens in every one of these steps."""
    running: int
    """Sequences that hold blocks, unfinished prefills included."""
    prefill_tokens: int


class ServingResult(Struct, frozen=True, kw_only=True):
    """A whole simulation; its size does not depend on the number of requests."""

    limits: Limits
    total_s: float
    """From time 0 to the end of the last step."""
    busy_s: float
    """Of these, seconds in which a step ran."""
    steps: int
    completed: int
    prompt_tokens: int
    """Of completed requests, as are `output_tokens` and `cached_tokens`."""
    output_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    """Tokens whose cache was given up by preemptions."""
    preemptions: int
    resident_max: int
    resident_mean: float
    """Over `total_s`."""
    pool_blocks: int
    pool_peak_blocks: int
    """Most blocks in use at once; what only the prefix cache still knows is not in use."""
    ttft_s: Histogram
    itl_s: Histogram
    """Between two deliveries of tokens to one request, as a streaming client measures it."""
    tpot_s: Histogram
    e2e_s: Histogram
    queue_s: Histogram
    timeline: tuple[tuple[float, float], ...]
    """Start of a bin in seconds and mean residents in it; at most 512 bins, all of `timeline_bin_s`."""
    timeline_bin_s: float
    requests: tuple[RequestRecord, ...]
    """The first that were completed, at most `KEPT_RECORDS`."""
    rejected: dict[str, int]
    """How many of each kind."""
    rejections: tuple[Rejection, ...]
    """The first of them, at most `KEPT_REJECTIONS`."""

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.total_s if self.total_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Completed requests over the whole time."""
        return self.completed / self.total_s if self.total_s else 0.0

    @property
    def rejected_count(self) -> int:
        """Rejected requests of all kinds."""
        return sum(self.rejected.values())

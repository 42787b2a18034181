"""A whole prefill from few of its chunks: a chunk's time is a smooth function of its position between steps.

The steps are where the number of staging buckets changes or another way of reading sets in. Chunks between two steps
form a run. A line over the chunks of a long run, or over the means of many short ones, is checked at its middle and cut
in two where it bends.
"""

from collections.abc import Callable, Hashable, Iterator

from twin.case import Case
from twin.counts import is_sparse, sparse_threshold
from twin.layouts.layout import Pass

STRAIGHT = 2e-4
"""Largest relative distance of a line's middle from the truth at which the line is kept."""

Weights = dict[int, float]
"""How many chunks each simulated chunk stands for, by the chunk's index."""


def prefilled_tokens(case: Case, prompt_tokens: int) -> int:
    """Prompt tokens that prefill passes over; the engine leaves the last for the first decode step."""
    return max(0, prompt_tokens - case.rules.prefilled_short_of)


def chunk_count(case: Case, prompt_tokens: int) -> int:
    """Passes that a prompt takes."""
    return -(-prefilled_tokens(case, prompt_tokens) // case.chunk_tokens)


def chunk_at(case: Case, prompt_tokens: int, index: int) -> Pass:
    """Pass number `index` of a prompt's prefill; the last may be shorter."""
    past = index * case.chunk_tokens
    rows = min(case.chunk_tokens, prefilled_tokens(case, prompt_tokens) - past)
    return Pass(past=past, rows=rows, batch=case.question.batch)


def sample(case: Case, prompt_tokens: int, seconds: Callable[[int], float]) -> Weights:
    """Indices of the chunks to simulate and the number of chunks each stands for; `seconds` simulates one."""
    weights: Weights = {}
    count = chunk_count(case, prompt_tokens)
    if count == 0:
        return weights
    full = prefilled_tokens(case, prompt_tokens) // case.chunk_tokens
    if full < count:
        weights[count - 1] = 1.0
    for family in _families(case, prompt_tokens, full):
        _sample_family(family, seconds, weights)
    return weights


Run = range
"""Consecutive chunks of one structure."""


def _families(case: Case, prompt_tokens: int, full: int) -> Iterator[list[Run]]:
    """Runs of full chunks, grouped while only the number of buckets changes from one to the next."""
    family: list[Run] = []
    kind: Hashable = None
    for run in _runs(case, full):
        run_kind = _kind(case, chunk_at(case, prompt_tokens, run.start))
        cut_short = bool(family) and len(run) < len(family[-1]) - 1  # the prompt's end: its mean is off the line
        if family and (run_kind != kind or cut_short):
            yield family
            family = []
        family.append(run)
        kind = run_kind
    if family:
        yield family


def _runs(case: Case, full: int) -> Iterator[Run]:
    """Full chunks between the contexts at which their structure changes."""
    start = 0
    steps = {sparse_threshold(case.model), *case.layout.steps(case, full * case.chunk_tokens)}
    for step in sorted(steps):
        stop = min(step // case.chunk_tokens, full)
        if stop > start:
            yield range(start, stop)
            start = stop
    if start < full:
        yield range(start, full)


def _kind(case: Case, chunk: Pass) -> tuple[Hashable, ...]:
    """Dense or sparse, and one bucket, several or none."""
    sparse = is_sparse(case.model, chunk.end)
    return sparse, min(case.layout.buckets(case, chunk), 2) if sparse else 0


def _sample_family(runs: list[Run], seconds: Callable[[int], float], weights: Weights) -> None:
    """A single run: its own line. Several: a line through their means, each run the mean of its two ends."""
    if len(runs) == 1:
        _sample_line(runs[0].start, runs[0].stop - 1, seconds, weights, lengths=None)
        return

    def mean(index: int) -> float:
        return (seconds(runs[index].start) + seconds(runs[index].stop - 1)) / 2

    over_runs: Weights = {}
    _sample_line(0, len(runs) - 1, mean, over_runs, lengths=[len(run) for run in runs])
    for index, chunks in over_runs.items():
        for end in (runs[index].start, runs[index].stop - 1):
            weights[end] = weights.get(end, 0.0) + chunks / 2


def _sample_line(
    low: int, high: int, value: Callable[[int], float], weights: Weights, *, lengths: list[int] | None
) -> None:
    """Spread the points low..high (each counted `lengths[i]` times, or once) over those where the line bends."""
    middle = (low + high) // 2
    if high - low > 1:
        share = (middle - low) / (high - low)
        line = value(low) * (1 - share) + value(high) * share
        if abs(line - value(middle)) > STRAIGHT * value(middle):
            _sample_line(low, middle, value, weights, lengths=lengths)
            _sample_line(middle + 1, high, value, weights, lengths=lengths)
            return
    points = range(low, high + 1)
    counts = [lengths[point] for point in points] if lengths else [1] * len(points)
    span = max(1, high - low)
    to_high = sum(count * (point - low) for point, count in zip(points, counts, strict=True)) / span
    weights[low] = weights.get(low, 0.0) + sum(counts) - to_high
    if to_high:
        weights[high] = weights.get(high, 0.0) + to_high

"""What benchmarks of servers report alike: first tokens, times between tokens, and how long all requests took."""

import math

from msgspec import Struct

from calibrate.benchmarks.points import (
    MOST_REQUESTS,
    Deviation,
    Left,
    Milliseconds,
    Point,
    Read,
    Reading,
    Seconds,
    Times,
    Told,
    spread_of,
)
from twin.units import MS

MANY = 1_000_000
"""Requests a second that are as good as all at once."""


class Served(Struct, frozen=True, kw_only=True):
    """Keys that `vllm bench serve` and SGLang's `bench_serving` have in common; others are left alone."""

    completed: Times
    total_input_tokens: Times | int
    total_output_tokens: Times | int
    duration: Seconds
    failed: int = 0
    max_concurrency: int | None = None
    request_rate: float | str | None = None
    mean_ttft_ms: Milliseconds | None = None
    median_ttft_ms: Milliseconds | None = None
    std_ttft_ms: Deviation | None = None
    mean_tpot_ms: Deviation | None = None
    median_tpot_ms: Deviation | None = None
    std_tpot_ms: Deviation | None = None


def served_points(row: Served, told: Told, where: str) -> Read:
    """First token and step where one request ran at a time, else the whole run where all requests came at once.

    A request of n output tokens is a first token and n - 1 steps. Lengths that differ are taken as their mean.
    """
    if row.failed:
        return [Left(where, f"{row.failed} requests failed: the others had the server for themselves")]
    if row.total_input_tokens < row.completed or row.total_output_tokens < row.completed:
        return [Left(where, "requests without a token")]
    prompt, output = round(row.total_input_tokens / row.completed), round(row.total_output_tokens / row.completed)
    if row.max_concurrency == 1:
        return _alone(row, told, where, prompt, output)
    rate = row.request_rate
    at_once = rate is None or (isinstance(rate, str) and rate == "inf") or (isinstance(rate, float) and rate >= MANY)
    if not at_once:
        return [Left(where, f"requests came at {rate} a second: how many ran at once is not told")]
    if row.completed > MOST_REQUESTS:
        return [Left(where, f"{row.completed:,} requests, more than the {MOST_REQUESTS:,} that are simulated")]
    most = row.max_concurrency or 0
    name = f"{where} {row.completed}x{prompt}+{output}" + (f"@c{most}" if most else "")
    point = Point(
        id=name, metric="served", seconds=row.duration, n=row.completed, prompt_tokens=prompt, steps=output,
        batch=most, requests=row.completed,
    )  # fmt: skip
    return [Reading(told, point)]


def _alone(row: Served, told: Told, where: str, prompt: int, output: int) -> Read:
    found: Read = []
    sizes = {"n": row.completed, "kv_tokens": 0, "batch": 1}
    for metric, middle, mean, deviation in (
        ("ttft", row.median_ttft_ms, row.mean_ttft_ms, row.std_ttft_ms),
        ("step", row.median_tpot_ms, row.mean_tpot_ms, row.std_tpot_ms),
    ):
        value = middle or mean
        if not value or not math.isfinite(value) or (metric == "step" and output < 2):
            continue
        own = {"prompt_tokens": prompt} if metric == "ttft" else {"kv_tokens": prompt, "steps": output - 1}
        told_by = f"{where} {metric} {prompt}+{output}"
        spread = spread_of(value, deviation or 0.0, row.completed)
        found.append(Reading(told, Point(id=told_by, metric=metric, seconds=value * MS, spread=spread, **sizes | own)))  # type: ignore[arg-type]
    return found or [Left(where, "neither a first token nor a time between tokens")]

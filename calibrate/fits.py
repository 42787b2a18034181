"""From raw samples to rates: bounded robust least squares on relative residuals, efficiencies, spreads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

Array = NDArray[np.float64]

HUBER = 0.03
"""Relative residuals beyond this count by their size, not by their square."""

EVERY = 1e9
"""As a limit in place of HUBER: plain least squares, where residuals are a misfit of the law and not a disturbance."""

PASSES = 1000
"""At most, until weights and coefficients agree: some 20 to 50 are needed."""

SETTLED = 1e-13
"""Relative change of the coefficients in the last pass."""

PULL = 1e-4
"""Weight, against a sample's, with which a column is held to explain nothing: columns that samples cannot tell apart
share what they explain. It moves what samples do tell by its square, 1e-8."""

LEAST_LATENCY_S = 1e-8
"""The smallest latency that a profile may hold."""

MOST_LATENCY_S = 0.9
"""The largest that a fit may claim."""

LATENCY_SHARE = 0.95
"""A fitted latency takes at most this share of the quickest call: the rest must move bytes."""

LEAST_EFFICIENCY = 1e-4
LEAST_STAGED = 3
"""Samples of several calls that a latency per call needs."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Coefficients of a sum of columns, and how far the samples lie from it."""

    coefficients: tuple[float, ...]
    residuals: tuple[float, ...]
    """(fitted - measured) / measured of each sample."""

    @property
    def spread(self) -> float:
        """Root mean square of the residuals, by the degrees of freedom that are left."""
        free = max(1, len(self.residuals) - len(self.coefficients))
        return math.sqrt(sum(residual**2 for residual in self.residuals) / free)


def solve(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    least: Sequence[float],
    most: Sequence[float] | None = None,
    huber: float = HUBER,
) -> Solution:
    """Coefficients least <= c <= most of seconds = sum of c[i] x columns[i], by least squares of relative residuals.

    Residuals beyond `huber` are weighed down: one disturbed sample does not bend a rate. Weights and coefficients are
    found in turns until both stay. ValueError for no samples.
    """
    if not seconds:
        raise ValueError("no samples to fit")
    matrix: Array = np.asarray(columns, dtype=np.float64).T
    measured: Array = np.asarray(seconds, dtype=np.float64)
    low: Array = np.asarray(least, dtype=np.float64)
    high: Array = np.full_like(low, np.inf) if most is None else np.asarray(most, dtype=np.float64)
    relative = matrix / measured[:, None]
    size = np.maximum(np.abs(relative).max(axis=0), 1e-300)  # columns differ by many powers of ten
    touched = np.abs(relative).max(axis=0) > 0  # a column of zeros says nothing: its coefficient stays at the bound
    weights = np.ones_like(measured)
    pull, nothing = PULL * np.eye(len(low)), np.zeros_like(low)
    found = low
    for _ in range(PASSES):
        root, before = np.sqrt(weights), found
        answer = lsq_linear(
            np.concatenate([relative / size * root[:, None], pull]), np.concatenate([root, nothing]),
            bounds=(low * size, high * size), method="bvls",
        )  # fmt: skip
        found = np.where(touched, np.clip(answer.x / size, low, high), low)
        if np.all(np.abs(found - before) <= SETTLED * np.abs(found)):
            break
        residuals = np.abs(relative @ found - 1.0)
        weights = np.where(residuals > huber, huber / np.maximum(residuals, huber), 1.0)
    return Solution(
        coefficients=tuple(float(value) for value in found),
        residuals=tuple(float(value) for value in relative @ found - 1.0),
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """seconds = latency x calls + bytes / rate."""

    latency_s: float
    bytes_per_s: float
    spread: float


def latency_and_rate(calls: Sequence[float], moved_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Latency per call and rate from samples of several sizes; neither is negative."""
    found = solve([calls, moved_bytes], seconds, least=[LEAST_LATENCY_S, 1e-15])
    latency, per_byte = found.coefficients
    return Line(latency_s=latency, bytes_per_s=1 / per_byte, spread=found.spread)


def queue_fit(copies: Sequence[float], moved_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, Line]:
    """(seconds once per queue, per-copy latency and rate) from queues of equal copies."""
    once = [1.0] * len(seconds)
    found = solve([once, copies, moved_bytes], seconds, least=[0.0, LEAST_LATENCY_S, 1e-15])
    start, latency, per_byte = found.coefficients
    return start, Line(latency_s=latency, bytes_per_s=1 / per_byte, spread=found.spread)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A kernel's latency per call and efficiency at each x, which together give back the samples."""

    latency_s: float
    at: tuple[float, ...]
    efficiency: tuple[float, ...]
    residuals: tuple[float, ...]
    """What is left after capping efficiencies at 1, and between samples that share an x."""

    @property
    def spread(self) -> float:
        """Root mean square of the residuals."""
        return math.sqrt(sum(residual**2 for residual in self.residuals) / len(self.residuals))


def latency_and_efficiency(
    x: Sequence[float],
    seconds: Sequence[float],
    roof_s: Sequence[float],
    *,
    latency_s: float | None = None,
    keep: bool = False,
) -> Shape:
    """Latency L and efficiencies e(x) of seconds = L + roof_s / e(x).

    `latency_s` is a latency known from elsewhere, 0 for none; otherwise it is regressed from the samples. Either way it
    is lowered until no sample is quicker than latency and roof together, as far as that is possible; `keep` leaves a
    known one as it is, where other samples than these set it.
    """
    if latency_s is None:
        latency_s = solve([[1.0] * len(seconds), roof_s], seconds, least=[0.0, 1.0]).coefficients[0]
    if keep:
        latency_s = min(latency_s, LATENCY_SHARE * min(seconds), MOST_LATENCY_S)
    elif latency_s > 0:
        slack = min(time - roof for time, roof in zip(seconds, roof_s, strict=True))
        latency_s = min(latency_s, LATENCY_SHARE * min(seconds), max(slack, 0.0), MOST_LATENCY_S)
        latency_s = max(latency_s, min(LEAST_LATENCY_S, 0.5 * min(seconds)))
    groups: dict[float, list[float]] = {}
    for position, time, roof in zip(x, seconds, roof_s, strict=True):
        groups.setdefault(position, []).append((time - latency_s) / roof)
    at = tuple(sorted(groups))
    efficiency = tuple(min(1.0, max(LEAST_EFFICIENCY, 1 / _middle(groups[position]))) for position in at)
    by_x = dict(zip(at, efficiency, strict=True))
    residuals = tuple(
        (latency_s + roof / by_x[position]) / time - 1 for position, time, roof in zip(x, seconds, roof_s, strict=True)
    )
    return Shape(latency_s=latency_s, at=at, efficiency=efficiency, residuals=residuals)


def _middle(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values, dtype=np.float64)))


@dataclass(frozen=True, kw_only=True)
class AttendSample:
    """One prefill attention: its calls (buckets), roofs of one call, and what it copies within the device."""

    region: float
    """Tokens that one call may read: a bucket, or the whole context in place."""
    buckets: float
    attend_s: float
    """Roof of the products of one call."""
    merge_s: float
    """Roof of carrying the running softmax over one bucket boundary."""
    copied_s: float
    """Roof of the copies, of all buckets."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AttendFit:
    """Latency per call, efficiency of the products over regions, and of carrying partial results."""

    latency_s: float
    regions: tuple[float, ...]
    efficiency: tuple[float, ...]
    merge_efficiency: float
    copy_efficiency: float
    residuals: tuple[float, ...]
    spread: float


def attend_fit(samples: Sequence[AttendSample]) -> AttendFit:
    """Fit seconds = buckets x (latency + products / e(region) + boundary / e2) + copies / e3, every e at most 1.

    Where nothing was staged, the efficiencies of boundary and copies are 1 and rest on no sample.
    """
    regions = sorted({sample.region for sample in samples})
    seconds = [sample.seconds for sample in samples]
    calls = [sample.buckets for sample in samples]
    products = [[s.buckets * s.attend_s if s.region == region else 0.0 for s in samples] for region in regions]
    rest = [[sample.buckets * sample.merge_s for sample in samples], [sample.copied_s for sample in samples]]
    most = min(LATENCY_SHARE * min(s.seconds / s.buckets for s in samples), MOST_LATENCY_S)
    least = [LEAST_LATENCY_S, *[1.0] * (len(regions) + 2)]
    if sum(count > 1 for count in calls) < LEAST_STAGED:  # then a latency cannot be told from an efficiency by regions
        pooled = [calls, [sum(column) for column in zip(*products, strict=True)], *rest]
        alone = solve(pooled, seconds, least=least[:4], most=[most, *[math.inf] * 3]).coefficients[0]
        least[0], most = alone, 1.001 * alone
    found = solve([calls, *products, *rest], seconds, least=least, most=[most, *[math.inf] * (len(regions) + 2)])
    latency, *inverse = found.coefficients
    efficiency = tuple(max(LEAST_EFFICIENCY, 1 / value) for value in inverse)
    return AttendFit(
        latency_s=latency,
        regions=tuple(regions),
        efficiency=efficiency[:-2],
        merge_efficiency=efficiency[-2],
        copy_efficiency=efficiency[-1],
        residuals=found.residuals,
        spread=found.spread,
    )

"""Bounded robust least squares on relative residuals, and the lines of a latency and a rate that it fits."""

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
    columns: Sequence[Sequence[float]], seconds: Sequence[float], *, least: Sequence[float],
    most: Sequence[float] | None = None, huber: float = HUBER,
) -> Solution:  # fmt: skip
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


def queue_fit(copies: Sequence[float], moved_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, Line]:
    """(seconds once per queue, per-copy latency and rate) from queues of equal copies."""
    once = [1.0] * len(seconds)
    found = solve([once, copies, moved_bytes], seconds, least=[0.0, LEAST_LATENCY_S, 1e-15])
    start, latency, per_byte = found.coefficients
    return start, Line(latency_s=latency, bytes_per_s=1 / per_byte, spread=found.spread)

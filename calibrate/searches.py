"""Least squares of relative residuals: sums of columns within bounds, and laws with priors down to their minimum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, lsq_linear

Array = NDArray[np.float64]

HUBER = 0.03
"""Relative residuals beyond this count by their size, not by their square."""
EVERY = 1e9
"""As a limit in place of HUBER: plain least squares, where residuals are a misfit of the law and not a disturbance."""
PASSES = 1000
"""At most, until weights and coefficients agree: some 20 to 50 are needed."""
STAYED = 1e-13
"""Relative change of the coefficients in the last pass."""
PULL = 1e-4
"""Weight, against a sample's, with which a column is held to explain nothing: columns that samples cannot tell apart
share what they explain. It moves what samples do tell by its square, 1e-8."""


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
        if np.all(np.abs(found - before) <= STAYED * np.abs(found)):
            break
        residuals = np.abs(relative @ found - 1.0)
        weights = np.where(residuals > huber, huber / np.maximum(residuals, huber), 1.0)
    return Solution(
        coefficients=tuple(float(value) for value in found),
        residuals=tuple(float(value) for value in relative @ found - 1.0),
    )


# Laws that are no sums: a search with priors, sharpened step by step, then polished

Law = Callable[[Array, float], tuple[Array, Array]]
"""(relative residuals, their Jacobian) at parameters and at a sharpness: of maxima, see `slower`."""
Terms = Callable[[Array], tuple[Array, Array]]
"""(what is squared and summed, its Jacobian) at parameters."""
NOISE, LEAST_NOISE = 0.02, 0.002
"""Relative residual that weighs as much as a parameter one deviation off its prior: at first, and at the least."""
ROBUST = 0.05
"""Relative residuals beyond this count by their size, not by their square: some calls alternate between two states."""
SHARPNESS = (8.0, 64.0, 512.0, 4096.0)
"""Powers at which a maximum is taken one after the other: the last is 2e-4 above it where both sides are equal."""
COARSE, TIGHT = 1e-6, 2.3e-16
"""Relative changes at which a step towards a sharper maximum ends, and the last of them."""
NEWTON_STEPS, KEPT_STEPS = 24, 4
"""Of Newton's method at most, and with one Hessian."""
SETTLED = 1e-11
"""Newton's last step, in units of a parameter."""
APART = 1e-6
"""Between the gradients of which a Hessian is made."""


class Prior(NamedTuple):
    """What is known of a parameter before any sample: it decides where samples do not."""

    centre: float
    deviation: float


class Found(NamedTuple):
    """Where a search ended."""

    parameters: Array
    residuals: Array
    """Relative, of the samples alone, in order."""
    noise: float
    """What a residual was weighed by."""


def slower(one: Array, other: Array, sharpness: float) -> tuple[Array, Array]:
    """(the larger of two positive numbers, smoothly; how far its logarithm follows that of `one`, 0 to 1).

    (one^p + other^p)^(1/p): a search crosses the edge of a maximum that it would stop at otherwise.
    """
    top = np.maximum(one, other)
    less = np.exp(sharpness * np.log(np.minimum(one, other) / top))
    follows = np.where(one >= other, 1.0, less) / (1.0 + less)
    return top * np.exp(np.log1p(less) / sharpness), follows


def minimum(law: Law, priors: Sequence[Prior], *, near: Found | None = None) -> Found:
    """Parameters with the least sum of robust squares of residuals and of squared distances from their priors.

    Begins at the priors' centres and takes the maxima of the law sharper step by step, then once more with the
    residuals' own size as their noise: priors tell little beside samples that a law fits well, and much beside others.
    From an end `near` by, which almost the same samples had, all that is known already. Newton's method goes on to
    where the gradient is zero, so that the end depends on the samples and not on the way there.
    """
    if near is None:
        centres = np.array([prior.centre for prior in priors])
        first = _search(law, priors, centres, NOISE, SHARPNESS)
        noise = max(LEAST_NOISE, float(np.sqrt(np.mean(first.residuals**2))))
        near = first._replace(noise=noise)
    return _search(law, priors, near.parameters, near.noise, SHARPNESS[-1:])


def _search(law: Law, priors: Sequence[Prior], at: Array, noise: float, powers: Sequence[float]) -> Found:
    centres = np.array([prior.centre for prior in priors])
    pull = noise / np.array([prior.deviation for prior in priors])

    def terms(at: Array, sharpness: float) -> tuple[Array, Array]:
        residuals, jacobian = law(at, sharpness)
        bent, slope = _bent(residuals)
        return np.concatenate([bent, pull * (at - centres)]), np.concatenate([jacobian * slope[:, None], np.diag(pull)])

    for sharpness in powers:
        at = _descended(partial(terms, sharpness=sharpness), at, COARSE)
    at = _polished(partial(terms, sharpness=powers[-1]), at)
    return Found(parameters=at, residuals=law(at, powers[-1])[0], noise=noise)


def _descended(terms: Terms, at: Array, tolerance: float) -> Array:
    """Levenberg and Marquardt's search."""

    def values(x: Array) -> Array:
        return terms(x)[0]

    def slopes(x: Array) -> Array:
        return terms(x)[1]

    found = least_squares(
        values, at, jac=slopes, method="lm", x_scale="jac", ftol=tolerance, xtol=tolerance, gtol=tolerance
    )
    return np.asarray(found.x)


def _bent(residuals: Array) -> tuple[Array, Array]:
    """(signed roots of the pseudo-Huber loss, their slopes): squares where residuals are small, sizes where large."""
    grown = np.sqrt(1 + (residuals / ROBUST) ** 2)
    slope = np.sqrt((grown + 1) / 2) / grown
    return residuals * np.sqrt(2 / (grown + 1)), slope


def _polished(terms: Terms, at: Array) -> Array:
    """Newton's method on the gradient; where it does not settle, from where a tighter search ends."""
    found, settled = _newton(terms, at)
    return found if settled else _newton(terms, _descended(terms, at, TIGHT))[0]


def _newton(terms: Terms, at: Array) -> tuple[Array, bool]:
    """(where its steps lead down to, whether they came to an end there)."""

    def gradient(x: Array) -> Array:
        values, jacobian = terms(x)
        return np.asarray(jacobian.T @ values)

    hessian = np.zeros((0, 0))
    cost = np.linalg.norm(terms(at)[0])
    for number in range(NEWTON_STEPS):
        if number % KEPT_STEPS == 0:
            aside = APART * np.eye(len(at))
            hessian = np.array([(gradient(at + step) - gradient(at - step)) / (2 * APART) for step in aside])
        step = np.linalg.solve((hessian + hessian.T) / 2, -gradient(at))
        after = np.linalg.norm(terms(at + step)[0])
        if after > cost * (1 + 1e-12):
            return at, False
        at, cost = at + step, after
        if np.max(np.abs(step)) <= SETTLED:
            return at, True
    return at, False

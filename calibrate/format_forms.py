"""Forms in which roofs hold a kernel over a cache, each fitted to samples; `format_fits` chooses among them.

Bytes, products and taking codes apart go on at the same time; the slowest holds the kernel. A profile knows one share
of the slower of bytes and products for each number of query tokens, and operations for each stored element beside it:
shares of bytes and of products become such a curve exactly, since their ratio depends on the query tokens alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.optimize import least_squares

from calibrate.fits import EVERY, LATENCY_SHARE, LEAST_EFFICIENCY, LEAST_LATENCY_S, Array, solve
from twin.ops import Op
from twin.roofline import Roofs

DECODING = (1e-2, 1e3)
"""Least and most operations an element that a fit may claim."""

LEAST_EACH_S = 1e-12
STARTS = ((0.9, 0.9), (0.6, 0.4), (0.2, 0.1))
"""Where searches begin: share of the roofs, and of what the quickest sample leaves for decoding."""

EXACT = 1e-12
"""Where a search ends: beyond what a library's version changes."""

STRAIGHT = 1e-3
"""Points of a curve that interpolation gives back within this are not kept."""


class Sampled(NamedTuple):
    """One timed call."""

    op: Op
    seconds: float


OpAt = Callable[[int], Op]
"""The op of some context for a number of query tokens."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kernel's rates: latency, latency for each query token, efficiencies over them, operations an element."""

    name: str
    latency_s: float
    latency_each_s: float
    at: tuple[float, ...]
    efficiency: tuple[float, ...]
    decoding: float
    residuals: tuple[float, ...]
    """(fitted - measured) / measured."""
    found: tuple[float, ...] = ()
    """Where the search ended."""

    def entry(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """As a kernel of a profile; rates below the least that a profile may hold are left out."""
        curve = {"over": "query_tokens", "at": list(self.at), "efficiency": list(self.efficiency), **provenance}
        rates = (("latency", self.latency_s, "s"), ("latency_each", self.latency_each_s, "s"))
        made = {
            name: {"value": value, "unit": unit, **provenance}
            for name, value, unit in (*rates, ("decoding", self.decoding, "1"))
            if value >= LEAST_LATENCY_S
        }
        return {"efficiency": curve, **made}


class _Bounds(NamedTuple):
    """Seconds of each sample at each roof, all calibrated, no latency."""

    seconds: Array
    grain: Array
    bytes_s: Array
    products_s: Array
    elements_s: Array
    """At one operation an element; zeros where nothing is decoded or no rate of instructions is known."""

    @property
    def roof_s(self) -> Array:
        """The slower of bytes and products."""
        return np.maximum(self.bytes_s, self.products_s)

    def most(self, *, each: bool) -> float:
        """The largest latency (for each query token) that leaves every sample some time for its bytes."""
        return _most(self.seconds / self.grain if each else self.seconds)


def efficiency_form(
    points: Sequence[Sampled], *, roofs: Roofs, op_at: OpAt, each: bool, near: Form | None = None
) -> Form:
    """Latency + each x query tokens + roof / e(query tokens), by least squares of relative residuals."""
    del near, op_at  # there is nothing to search, and no curve beyond the samples
    bounds = _bounds(points, roofs)
    at = sorted({point.op.grain for point in points})
    columns = [list(np.where(bounds.grain == one, bounds.roof_s, 0.0)) for one in at]
    slowest, seconds = [1 / LEAST_EFFICIENCY] * len(at), list(bounds.seconds)
    if len(points) == len(at):  # one size at each: no latency can be told from an efficiency
        found = solve(columns, seconds, least=[1.0] * len(at), most=slowest, huber=EVERY)
        latency, more, inverse = 0.0, 0.0, found.coefficients
    else:
        found = solve(
            [[1.0] * len(points), list(bounds.grain if each else 0 * bounds.grain), *columns],
            seconds,
            least=[LEAST_LATENCY_S, 0.0, *[1.0] * len(at)],
            most=[bounds.most(each=False), bounds.most(each=True), *slowest],
            huber=EVERY,
        )
        latency, more, *rest = found.coefficients
        inverse = tuple(rest)
    return Form(
        name="efficiency", latency_s=latency, latency_each_s=more, at=tuple(at),
        efficiency=tuple(1 / value for value in inverse), decoding=0.0, residuals=found.residuals,
    )  # fmt: skip


def shares_form(points: Sequence[Sampled], *, roofs: Roofs, op_at: OpAt, each: bool, near: Form | None = None) -> Form:
    """Latency + each x query tokens + max(bytes / e, products / e'): two shares for all numbers of query tokens."""
    return _roofs_form("shares", points, roofs, op_at, each=each, read_share=None, near=near)


def decoding_form(
    points: Sequence[Sampled], *, roofs: Roofs, op_at: OpAt, each: bool, read_share: float, near: Form | None = None
) -> Form:  # fmt: skip
    """The same with elements x decoding beside; what reading alone reaches is known from a kernel that only reads."""
    return _roofs_form("decoding", points, roofs, op_at, each=each, read_share=read_share, near=near)


def _roofs_form(
    name: str, points: Sequence[Sampled], roofs: Roofs, op_at: OpAt, *, each: bool, read_share: float | None,
    near: Form | None,
) -> Form:  # fmt: skip
    """Three roofs, fitted in the logarithms of latency, latency for each, shares of bytes and products, decoding.

    `near` is a fit to begin from; without one the search begins at several places.
    """
    bounds = _bounds(points, roofs)
    free = np.array([True, each, read_share is None, True, read_share is not None])
    fixed = np.log([LEAST_LATENCY_S, LEAST_EACH_S, read_share or 1.0, 1.0, DECODING[0]])
    least = np.log([LEAST_LATENCY_S, LEAST_EACH_S, LEAST_EFFICIENCY, LEAST_EFFICIENCY, DECODING[0]])
    most = np.log([bounds.most(each=False), bounds.most(each=True), 1.0, 1.0, DECODING[1]])

    def everything(logs: Array) -> Array:
        whole = fixed.copy()
        whole[free] = logs
        return np.asarray(np.exp(whole), dtype=np.float64)

    def residuals(logs: Array) -> Array:
        latency, more, read, share, decoding = everything(logs)
        held = np.maximum(np.maximum(bounds.bytes_s / read, bounds.products_s / share), bounds.elements_s * decoding)
        made = latency + (more * bounds.grain if each else 0.0) + held
        return np.asarray(made / bounds.seconds - 1, dtype=np.float64)

    left = float(np.min(bounds.seconds / np.maximum(bounds.elements_s, 1e-30)))
    starts = [
        np.log([0.5 * bounds.most(each=False), 0.05 * bounds.most(each=True), part, 0.5 * part, coded * left])[free]
        for part, coded in STARTS
    ]
    low, high = least[free], most[free]
    answers = [
        least_squares(
            residuals,
            np.clip(start, low + 1e-9, high - 1e-9),
            bounds=(low, high),
            x_scale="jac",
            ftol=EXACT,
            xtol=EXACT,
            gtol=EXACT,
        )
        for start in (starts if near is None else [np.array(near.found)])
    ]
    found = min(answers, key=lambda answer: float(answer.cost))
    latency, more, read, share, decoding = (float(value) for value in everything(found.x))
    held = (bounds.bytes_s / read, bounds.products_s / share, bounds.elements_s * decoding)
    if not np.any(held[1] > np.maximum(held[0], held[2])):
        share = 1.0  # products hold no sample: any share from this on would do
    if not np.any(held[2] > np.maximum(held[0], held[1])):
        decoding = 0.0
    every = range(1, max(1, int(bounds.grain.max())) + 1)
    curve = straightened({float(grain): _share_of(op_at(grain), roofs, read, share) for grain in every})
    return Form(
        name=name, latency_s=latency, latency_each_s=more if each else 0.0, at=tuple(curve),
        efficiency=tuple(curve.values()), decoding=decoding,
        residuals=tuple(float(value) for value in residuals(found.x)), found=tuple(float(value) for value in found.x),
    )  # fmt: skip


def _share_of(op: Op, roofs: Roofs, read: float, share: float) -> float:
    """What of the slower roof is left where bytes reach `read` of theirs and products `share`."""
    bytes_s = roofs.cost(replace(op, kernel="", flops=0)).bound_s
    products_s = roofs.cost(replace(op, kernel="", vram_bytes=0)).bound_s
    return max(bytes_s, products_s) / max(bytes_s / read, products_s / share)


def straightened(curve: dict[float, float]) -> dict[float, float]:
    """The points that interpolation over the logarithm needs to give all of them back."""
    at = list(curve)
    kept = [at[0]]
    for position in range(1, len(at) - 1):
        if not _between(curve, kept[-1], at[position + 1], at[at.index(kept[-1]) + 1 : position + 1]):
            kept.append(at[position])
    if len(at) > 1 and not (len(kept) == 1 and abs(curve[at[-1]] / curve[at[0]] - 1) < STRAIGHT):
        kept.append(at[-1])
    return {point: curve[point] for point in kept}


def _between(curve: dict[float, float], low: float, high: float, points: Sequence[float]) -> bool:
    """Whether the line from `low` to `high` passes by all points in between."""
    for point in points:
        weight = float(np.log(point / low) / np.log(high / low))
        line = curve[low] * (1 - weight) + curve[high] * weight
        if abs(line / curve[point] - 1) > STRAIGHT:
            return False
    return True


def _bounds(points: Sequence[Sampled], roofs: Roofs) -> _Bounds:
    instructions = roofs.profile.gpu.instructions
    per_s = instructions.rate.value if instructions is not None else np.inf
    ops = [replace(point.op, kernel="") for point in points]
    return _Bounds(
        seconds=np.array([point.seconds for point in points]),
        grain=np.array([op.grain for op in ops], dtype=np.float64),
        bytes_s=np.array([roofs.cost(replace(op, flops=0)).bound_s for op in ops]),
        products_s=np.array([roofs.cost(replace(op, vram_bytes=0)).bound_s for op in ops]),
        elements_s=np.array([op.decoded for op in ops], dtype=np.float64) / per_s,
    )


def _most(seconds: Iterable[float]) -> float:
    return max(2 * LEAST_LATENCY_S, LATENCY_SHARE * min(seconds))

"""Forms in which roofs hold a kernel over a cache, each fitted to samples; `format_fits` chooses among them.

Where the twin knows how a kernel is cut into programs, reading goes on beside the operations of the programs, and the
slower of the two holds the kernel:

    seconds = latency + partial results / share + max(bytes / share, elements x operations(rows))

`operations` costs an element so much and so much more for each query row of a program; by `rows`, programs of each
number of rows have a number of their own. Elsewhere (`efficiency`) there is a share of the roofs for each number of
query tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.fits import EVERY, LATENCY_SHARE, LEAST_EFFICIENCY, LEAST_LATENCY_S, Array, solve
from twin.ops import Op
from twin.roofline import Roofs

OPERATIONS = (1e-3, 1e3)
"""Least and most operations an element (for each row) that a fit may claim."""

MERGING = (2e-2, 2.0)
"""The same of the share of the memory's rate for partial results, most of which stay on the chip."""

LEAST_READ = 0.05
NEAR_PLAIN = 0.9
"""Share of what the kernel of plain caches reaches of the memory's rate that any other reaches where bytes hold it."""

STARTS = (0.5, 0.15)
"""Where searches begin: what part of the quickest sample for its work is the operations' own."""

ROBUST = 0.05
"""Relative residuals beyond this count by their size, not by their square: some calls alternate between two states."""

EXACT = 1e-12
"""Where a search ends: beyond what a library's version changes."""


class Sampled(NamedTuple):
    """One timed call."""

    op: Op
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kernel's rates: latency, share for partial results, efficiencies over query tokens, operations over rows."""

    name: str
    latency_s: float
    at: tuple[float, ...]
    efficiency: tuple[float, ...]
    residuals: tuple[float, ...]
    """(fitted - measured) / measured."""
    merging: float = 0.0
    operations: tuple[tuple[float, float], ...] = ()
    """(rows of a program, operations an element)."""
    found: tuple[float, ...] = ()
    """Where the search ended."""

    def entry(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """As a kernel of a profile; rates below the least that a profile may hold are left out."""
        made: dict[str, Any] = {
            "efficiency": {
                "over": "query_tokens", "at": list(self.at), "efficiency": list(self.efficiency), **provenance
            }
        }  # fmt: skip
        if self.latency_s >= LEAST_LATENCY_S:
            made["latency"] = {"value": self.latency_s, "unit": "s", **provenance}
        if self.merging:
            made["merging"] = {"value": self.merging, "unit": "1", **provenance}
        if self.operations:
            at, counts = zip(*self.operations, strict=True)
            made["operations"] = {"over": "program_rows", "at": list(at), "counts": list(counts), **provenance}
        return made


class _Bounds(NamedTuple):
    """Seconds of each sample at each roof, all calibrated, no latency."""

    seconds: Array
    rows: Array
    bytes_s: Array
    merged_s: Array
    """Partial results at the memory's rate."""
    elements_s: Array
    """At one operation an element."""


def efficiency_form(points: Sequence[Sampled], *, roofs: Roofs) -> Form:
    """Latency + roof / e(query tokens), by least squares of relative residuals."""
    seconds = [point.seconds for point in points]
    grain = np.array([point.op.grain for point in points], dtype=np.float64)
    roof_s = np.array([roofs.cost(replace(point.op, kernel="")).bound_s for point in points])
    at = sorted(set(grain.tolist()))
    columns = [list(np.where(grain == one, roof_s, 0.0)) for one in at]
    slowest = [1 / LEAST_EFFICIENCY] * len(at)
    if len(points) == len(at):  # one size at each: no latency can be told from an efficiency
        found = solve(columns, seconds, least=[1.0] * len(at), most=slowest, huber=EVERY)
        latency, inverse = 0.0, found.coefficients
    else:
        found = solve(
            [[1.0] * len(points), *columns],
            seconds,
            least=[LEAST_LATENCY_S, *[1.0] * len(at)],
            most=[_most_latency(seconds), *slowest],
            huber=EVERY,
        )
        latency, *rest = found.coefficients
        inverse = tuple(rest)
    return Form(
        name="efficiency", latency_s=latency, at=tuple(at), efficiency=tuple(1 / value for value in inverse),
        residuals=found.residuals,
    )  # fmt: skip


def programs_form(
    points: Sequence[Sampled],
    *,
    roofs: Roofs,
    kind: Literal["operations", "rows"],
    plain_read: float | None = None,
    near: Form | None = None,
) -> Form:
    """A latency, a share for partial results, one for bytes, operations an element: fitted in their logarithms.

    `plain_read` is the share of bytes that the kernel of plain caches reaches: others come near to it, and have it
    where bytes hold none of their samples. `near` is a fit to begin from; without one the search begins at several
    places.
    """
    bounds = _bounds(points, roofs)
    each = sorted(set(bounds.rows.tolist()))
    count = 2 if kind == "operations" else len(each)
    place = np.searchsorted(each, bounds.rows)

    def of_rows(counts: Array) -> Array:
        return counts[0] + counts[1] * np.array(each) if kind == "operations" else counts

    def residuals(logs: Array) -> Array:
        latency, merging, read, *counts = np.exp(logs)
        held = np.maximum(bounds.bytes_s / read, bounds.elements_s * of_rows(np.array(counts))[place])
        return np.asarray((latency + bounds.merged_s / merging + held) / bounds.seconds - 1, dtype=np.float64)

    least_read = LEAST_READ if plain_read is None else NEAR_PLAIN * plain_read
    most = _most_latency(bounds.seconds.tolist())
    low = np.log([LEAST_LATENCY_S, MERGING[0], least_read, *[OPERATIONS[0]] * count])
    high = np.log([most, MERGING[1], 1.0, *[OPERATIONS[1]] * count])
    left = float(np.min(bounds.seconds / bounds.elements_s))
    starts = [
        np.log([0.5 * most, 0.5, 0.9, *([part * left, part * left / each[0]] if kind == "operations" else
                                        [part * left * rows / each[0] for rows in each])])
        for part in STARTS
    ]  # fmt: skip
    if near is not None and len(near.found) == len(low):
        starts = [np.array(near.found)]
    answers = [
        least_squares(
            residuals,
            np.clip(start, low + 1e-9, high - 1e-9),
            bounds=(low, high),
            x_scale="jac",
            loss="soft_l1",
            f_scale=ROBUST,
            ftol=EXACT,
            xtol=EXACT,
            gtol=EXACT,
        )
        for start in starts
    ]
    found = min(answers, key=lambda answer: float(answer.cost))
    latency, merging, read, *counts = (float(value) for value in np.exp(found.x))
    read, operations = _told(bounds, read, of_rows(np.array(counts)), place, plain_read, line=kind == "operations")
    return Form(
        name=kind, latency_s=latency, merging=merging, at=(1.0,), efficiency=(read,),
        operations=tuple((float(rows), float(value)) for rows, value in zip(each, operations, strict=True)),
        residuals=tuple(float(value) for value in residuals(found.x)), found=tuple(float(value) for value in found.x),
    )  # fmt: skip


def _told(
    bounds: _Bounds, read: float, operations: Array, place: NDArray[np.intp], plain_read: float | None, *, line: bool
) -> tuple[float, Array]:
    """(share of bytes, operations) that samples tell.

    In place of what holds none of them: the plain kernel's share, half of the most operations that leave every sample
    as it is fitted. Two numbers that hold samples make a line.
    """
    bytes_s, work_s = bounds.bytes_s / read, bounds.elements_s * operations[place]
    if plain_read is not None and not np.any(bytes_s > work_s):
        read = max(plain_read, float(np.max(bounds.bytes_s / work_s)))
    silent = [number for number in range(len(operations)) if not np.any((work_s >= bytes_s)[place == number])]
    if line and len(operations) - len(silent) > 1:
        return read, operations
    told = operations.copy()
    for number in silent:
        own = place == number
        told[number] = 0.5 * float(np.min(bytes_s[own] / bounds.elements_s[own]))
    return read, told


def _bounds(points: Sequence[Sampled], roofs: Roofs) -> _Bounds:
    gpu = roofs.profile.gpu
    if gpu.instructions is None:
        raise ValueError("operations of programs need a rate of instructions")
    cuts = [point.op.cut for point in points]
    shares = [cut.on(gpu.sm_count) for cut in cuts if cut is not None]
    return _Bounds(
        seconds=np.array([point.seconds for point in points]),
        rows=np.array([cut.rows for cut in cuts if cut is not None], dtype=np.float64),
        bytes_s=np.array([point.op.vram_bytes / gpu.vram_read.rate.value for point in points]),
        merged_s=np.array([share.merged_bytes / gpu.vram_read.rate.value for share in shares]),
        elements_s=np.array([share.elements / gpu.instructions.rate.value for share in shares]),
    )


def _most_latency(seconds: Sequence[float]) -> float:
    """The largest that leaves every sample some time for its bytes."""
    return max(2 * LEAST_LATENCY_S, LATENCY_SHARE * min(seconds))

"""Forms in which roofs hold a kernel over a cache, each fitted to samples; `format_fits` chooses among them.

Where the twin knows how a kernel is cut into programs, reading goes on beside the operations of the programs, and the
slower of the two holds the kernel:

    seconds = latency + partial results / share + max(bytes / share, elements x operations(rows))

`operations` costs an element so much and so much more for each query row of a program; by `rows`, programs of each
number of rows have a number of their own. Elsewhere (`efficiency`) there is a share of the roofs for each number of
query tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.special import expit, logit

from calibrate.fits import EVERY, LATENCY_SHARE, LEAST_EFFICIENCY, LEAST_LATENCY_S, Array, solve
from calibrate.searches import Found, Prior, minimum, slower
from twin.cost.roofline import Roofs
from twin.operations.ops import Op

FACTOR_4, FACTOR_2 = math.log(4), math.log(2)
READ = Prior(logit(0.9), 1.4)
"""Share of the memory's rate that a kernel reaches where bytes hold it, as log-odds: 0.7 to 0.97."""

NEAR_PLAIN = 0.35
"""Deviation of the same from what the kernel of plain caches reaches: at 0.96, 0.94 to 0.97."""

MERGING = Prior(math.log(0.5), FACTOR_4)
"""Logarithm of the share of the memory's rate for partial results, most of which stay on the chip."""

LATENCY_PART, OPERATIONS_PART = 0.5, 0.3
"""Of the quickest sample, and of the quickest for its work: what latency and operations begin at."""


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
    combine: float = 0.0
    operations: tuple[tuple[float, float], ...] = ()
    """(rows of a program, operations an element)."""
    found: Found | None = None
    """Where the search ended."""
    line: "Form | None" = None
    """Near which a number for each kind of program was looked for."""

    def entry(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """As a kernel of a profile; rates below the least that a profile may hold are left out."""
        made: dict[str, Any] = {
            "efficiency": {
                "over": "query_tokens", "at": list(self.at), "efficiency": list(self.efficiency), **provenance
            }
        }  # fmt: skip
        if self.latency_s >= LEAST_LATENCY_S:
            made["latency"] = {"value": self.latency_s, "unit": "s", **provenance}
        if self.combine:
            made["combine"] = {"value": self.combine, "unit": "1", **provenance}
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
    plain_read: float | None = None,
    near: Form | None = None,
    line: Form | None = None,
) -> Form:
    """A latency, a share for partial results, one for bytes, operations an element: fitted in their logarithms.

    Operations are so many and so many more a query row; where `line` is such a fit, they are a number for each kind of
    program near it. What the samples do not tell is as the priors have it: others read as the kernel of plain caches
    does (`plain_read`). `near` is a fit of almost the same samples to begin from.
    """
    bounds = _bounds(points, roofs)
    each, place = np.unique(bounds.rows, return_inverse=True)
    if line is None:
        of_parameters = np.stack([np.ones_like(each), each], axis=1)
        left = OPERATIONS_PART * float(np.min(bounds.seconds / bounds.elements_s))
        counts = [Prior(math.log(left / rows), FACTOR_4) for rows in (1.0, float(each[0]))]
    else:
        of_parameters = np.eye(len(each))
        counts = [Prior(math.log(operations), FACTOR_2) for _, operations in line.operations]
    latency_s = LATENCY_PART * _most_latency(bounds.seconds.tolist())
    read = READ if plain_read is None else Prior(logit(plain_read), NEAR_PLAIN)
    found = minimum(
        partial(_law, bounds, of_parameters[place]),
        [Prior(math.log(latency_s), FACTOR_4), MERGING, read, *counts],
        near=None if near is None else near.found,
    )
    at = found.parameters
    return Form(
        name="operations" if line is None else "rows",
        latency_s=math.exp(at[0]), combine=math.exp(at[1]), at=(1.0,), efficiency=(float(expit(at[2])),),
        operations=tuple(zip(each.tolist(), (of_parameters @ np.exp(at[3:])).tolist(), strict=True)),
        residuals=tuple(found.residuals.tolist()), found=found, line=line,
    )  # fmt: skip


def _law(bounds: _Bounds, of_parameters: Array, at: Array, sharpness: float) -> tuple[Array, Array]:
    """Relative residuals and their Jacobian. `of_parameters`: how often each count is in an element of each sample."""
    latency_s, merged_s, share = math.exp(at[0]), bounds.merged_s / math.exp(at[1]), float(expit(at[2]))
    counted = of_parameters * np.exp(at[3:])
    each = counted.sum(axis=1)
    held_s, of_bytes = slower(bounds.bytes_s / share, bounds.elements_s * each, sharpness)
    slopes = [np.full_like(held_s, latency_s), -merged_s, -held_s * of_bytes * (1 - share)]
    of_counts = counted * (held_s * (1 - of_bytes) / each)[:, None]
    jacobian = np.concatenate([np.stack(slopes, axis=1), of_counts], axis=1) / bounds.seconds[:, None]
    return (latency_s + merged_s + held_s) / bounds.seconds - 1, jacobian


def _bounds(points: Sequence[Sampled], roofs: Roofs) -> _Bounds:
    gpu = roofs.profile.gpu
    if gpu.instructions is None:
        raise ValueError("operations of programs need a rate of instructions")
    cuts = [point.op.split_kv for point in points]
    shares = [cut.on(gpu.sm_count) for cut in cuts if cut is not None]
    return _Bounds(
        seconds=np.array([point.seconds for point in points]),
        rows=np.array([cut.q_rows for cut in cuts if cut is not None], dtype=np.float64),
        bytes_s=np.array([point.op.vram_bytes / gpu.vram_read.rate.value for point in points]),
        merged_s=np.array([share.combined_bytes / gpu.vram_read.rate.value for share in shares]),
        elements_s=np.array([share.elements / gpu.instructions.rate.value for share in shares]),
    )


def _most_latency(seconds: Sequence[float]) -> float:
    """The largest that leaves every sample some time for its bytes."""
    return max(2 * LEAST_LATENCY_S, LATENCY_SHARE * min(seconds))

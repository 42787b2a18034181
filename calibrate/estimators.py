"""Four estimators of a kernel's rates: what `twin.cost.roofline.Roofs.cost` makes seconds of, turned round.

* `exact`: a latency, and an efficiency at each calibrated size that gives the sample back;
* `streamed`: the same, with the latency that the smallest size shows beyond its bytes;
* `least_squares`: a latency and an efficiency for several samples alike, beside other kernels in the same call;
* `ThreadBlocks`: a latency, shares of the memory's rate, and operations an element, found by a search with priors.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace as changed
from scipy.special import expit, logit

from calibrate.probes import Sample
from calibrate.searches import EVERY, HUBER, Array, Found, Prior, minimum, slower, solve
from hwprofiles.profile import LEAST_LATENCY_S, RESIDENT_PROGRAMS, Gpu, HardwareProfile, Kernel
from twin.cost.roofline import Cost, Roofs
from twin.operations.occupancy import RESIDENT
from twin.operations.ops import Op
from twin.prediction import Z90

COMBINE = "combine"
"""Key in a profile of the share of the memory's rate for partial results."""
MOST_LATENCY_S = 0.9
"""The largest that a fit may claim."""
LATENCY_SHARE = 0.95
"""A fitted latency takes at most this share of the quickest call: the rest must move bytes."""
LEAST_EFFICIENCY = 1e-4
LEAST_STAGED = 3
"""Samples of several calls that a latency per call needs, where other kernels share them."""
UNSEEN = 0.04
"""Spread that a fit through all of its points does not show: of an H200's chunks of twice as many sizes."""
COMBINE_SHARES = (2e-2, 2.0)
"""Least and most of the share for partial results that least squares may claim."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A kernel's rates, and how far they are from the samples."""

    latency_s: float
    at: tuple[float, ...]
    efficiency: tuple[float, ...]
    residuals: tuple[float, ...]
    """(fitted - measured) / measured."""
    over: str = ""
    """Axis of the efficiency, where it is not that of the fit."""
    combine: float = 0.0
    """Share of the memory's rate for partial results."""
    operations: tuple[tuple[float, float], ...] = ()
    """(query rows of a thread block, operations an element)."""
    beside: tuple[float, ...] = ()
    """Efficiencies of the parts that were fitted jointly."""
    spread: float = 0.0
    left_out: Mapping[int, float] | None = None
    """(predicted - measured) / measured of samples that the rates were not fitted on, by number."""
    tried: Mapping[str, float] | None = None
    """Left-out error of each form that was tried."""
    note: str = ""
    found: Found | None = None
    """Where a search ended."""
    line: "Rates | None" = None
    """Near which a number for each kind of thread block was looked for."""

    def entry(self, over: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """As a kernel of a profile; a latency below the least that a profile may hold is left out."""
        curve = {"over": self.over or over, "at": list(map(float, self.at)), "efficiency": list(self.efficiency)}
        made: dict[str, Any] = {"efficiency": curve | dict(provenance)}
        if self.latency_s >= LEAST_LATENCY_S:
            made["latency"] = {"value": self.latency_s, "unit": "s", **provenance}
        if self.combine:
            made[COMBINE] = {"value": self.combine, "unit": "1", **provenance}
        if self.operations:
            at, counts = zip(*self.operations, strict=True)
            made["operations"] = {"over": "program_rows", "at": list(at), "counts": list(counts), **provenance}
        return made


class Timing(NamedTuple):
    """A sample as its kernel sees it: all seconds are of one call."""

    sample: Sample
    op: Op
    calls: float
    seconds: float
    """Measured, less what runs beside it."""
    roof_s: float
    """At the roofs that an efficiency is a share of: no latency, efficiency 1."""
    beside_s: float
    joint_s: tuple[float, ...]
    """At the roofs of the parts that are fitted jointly."""
    keys: Mapping[str, str]
    """Key of each part's kernel."""


# One efficiency a size


def exact(timings: Sequence[Timing], *, latency_s: float | None = None, keep: bool = False) -> Rates:
    """Latency L and efficiencies e(x) of seconds = L + roof / e(x), by medians at each x.

    `latency_s` is one known from elsewhere, 0 for none, which `keep` leaves as it is; otherwise it is regressed, and
    lowered until no sample is quicker than latency and roof together, as far as that is possible.
    """
    seconds, roofs = [each.seconds for each in timings], [each.roof_s for each in timings]
    latency_s = regressed(timings, most_efficiency=1.0) if latency_s is None else latency_s
    if keep:
        latency_s = min(latency_s, LATENCY_SHARE * min(seconds), MOST_LATENCY_S)
    elif latency_s > 0:
        slack = min(time - roof for time, roof in zip(seconds, roofs, strict=True))
        latency_s = min(latency_s, LATENCY_SHARE * min(seconds), max(slack, 0.0), MOST_LATENCY_S)
        latency_s = max(latency_s, min(LEAST_LATENCY_S, 0.5 * min(seconds)))
    groups: dict[float, list[float]] = {}
    for each in timings:
        groups.setdefault(each.op.grain, []).append((each.seconds - latency_s) / each.roof_s)
    by_x = {x: min(1.0, max(LEAST_EFFICIENCY, 1 / float(np.median(groups[x])))) for x in sorted(groups)}
    residuals = tuple((latency_s + each.roof_s / by_x[each.op.grain]) / each.seconds - 1 for each in timings)
    return Rates(
        latency_s=latency_s, at=tuple(by_x), efficiency=tuple(by_x.values()), residuals=residuals,
        spread=root_mean_square(residuals),
    )  # fmt: skip


def regressed(timings: Sequence[Timing], *, most_efficiency: float) -> float:
    """Latency of seconds = L + roof / e with one e of at most so much."""
    columns = [[1.0] * len(timings), [each.roof_s for each in timings]]
    return solve(columns, [each.seconds for each in timings], least=[0.0, 1 / most_efficiency]).coefficients[0]


def latency_of_sizes(timings: Sequence[Timing]) -> float | None:
    """Regressed at the smallest x that has several sizes, whose differences may be quicker than the roof; or None."""
    for x in sorted({each.op.grain for each in timings}):
        sized = [each for each in timings if each.op.grain == x]
        if len({each.roof_s for each in sized}) > 1:
            return regressed(sized, most_efficiency=math.inf)
    return None


def streamed(timings: Sequence[Timing]) -> Rates:
    """The latency is what the first sample takes beyond its bytes, at the efficiency between it and the second."""
    first, *rest = timings
    if not rest:
        return exact(timings, latency_s=0)
    slope = (rest[0].seconds - first.seconds) / (rest[0].roof_s - first.roof_s)
    latency = max(first.seconds - first.roof_s * max(1.0, slope), 0.5 * first.seconds)
    rates = exact(rest, latency_s=latency, keep=True)
    residual = (rates.latency_s + first.roof_s / rates.efficiency[0]) / first.seconds - 1
    residuals = (residual, *rates.residuals)
    return replace(
        rates, at=(first.op.grain, *rates.at), efficiency=(rates.efficiency[0], *rates.efficiency),
        residuals=residuals, spread=root_mean_square(residuals),
    )  # fmt: skip


def root_mean_square(errors: Sequence[float]) -> float:
    """Of at least one error."""
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


# One efficiency for several samples


def least_squares(timings: Sequence[Timing], *, gpu: Gpu) -> Rates:
    """Fit seconds = latency + roof / e(x) + what other kernels of the call take, every e at most 1.

    Where the twin knows how thread blocks fill the device in waves, x is how many a multiprocessor holds, and partial
    results have a share of the memory's rate; else it is the op's grain. Alone, one law for all samples misses some of
    them and none is a disturbance: plain least squares. Where no latency can be told from an efficiency there is none.
    """
    seconds, joint = [each.seconds for each in timings], list(zip(*(each.joint_s for each in timings), strict=True))
    in_waves = timings[0].op.flash_grid is not None and gpu.instructions is not None
    shares, combined = _in_waves(timings, gpu) if in_waves else (_by_grain(timings), [])
    extra = [*joint, *([combined] if any(combined) else [])]
    bounds = [(1.0, 1 / LEAST_EFFICIENCY)] * (len(shares) + len(joint))
    bounds += [(1 / COMBINE_SHARES[1], 1 / COMBINE_SHARES[0])] * (len(extra) - len(joint))
    columns: list[Sequence[float]] = [*shares.values(), *extra]
    alone = not joint and len(timings) <= len(shares)
    if not alone:
        columns, bounds = [[1.0] * len(timings), *columns], [_latency_bounds(timings, shares, joint), *bounds]
    found = solve(
        columns, seconds, least=[low for low, _ in bounds], most=[high for _, high in bounds],
        huber=HUBER if joint else EVERY,
    )  # fmt: skip
    latency_s, *inverse = (0.0, *found.coefficients) if alone else found.coefficients
    fitted = [sum(map(mul, found.coefficients, terms)) for terms in zip(*columns, strict=True)]
    residuals = tuple(
        (each.beside_s + time) / (each.sample.median_s / each.calls) - 1
        for each, time in zip(timings, fitted, strict=True)
    )
    efficiency = tuple(1 / value for value in inverse)
    sizes = {(each.op.grain, each.op.flops, each.op.vram_bytes) for each in timings}
    spread = found.spread if joint else root_mean_square(residuals)
    return Rates(
        latency_s=latency_s, at=tuple(shares), efficiency=efficiency[: len(shares)], residuals=residuals,
        over=RESIDENT_PROGRAMS if in_waves else "", combine=efficiency[-1] if len(extra) > len(joint) else 0.0,
        beside=efficiency[len(shares) : len(shares) + len(joint)],
        spread=max(spread, UNSEEN) if len(sizes) <= len(columns) else spread,
    )  # fmt: skip


def _latency_bounds(
    timings: Sequence[Timing], shares: Mapping[float, Sequence[float]], joint: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Least and most; nearly one number where too few samples have several calls for other kernels to be told apart."""
    seconds = [each.seconds for each in timings]
    most = max(2 * LEAST_LATENCY_S, min(LATENCY_SHARE * min(seconds), MOST_LATENCY_S))
    if not joint or sum(each.calls > 1 for each in timings) >= LEAST_STAGED:
        return LEAST_LATENCY_S, most
    pooled = [[1.0] * len(timings), [sum(column) for column in zip(*shares.values(), strict=True)], *joint]
    least = [LEAST_LATENCY_S, *[1.0] * (len(pooled) - 1)]
    alone = solve(pooled, seconds, least=least, most=[most, *[math.inf] * (len(pooled) - 1)]).coefficients[0]
    return alone, 1.001 * alone


def _by_grain(timings: Sequence[Timing]) -> dict[float, list[float]]:
    """By grain: seconds at the whole roof, of calls with another grain 0."""
    return {
        x: [each.roof_s if each.op.grain == x else 0.0 for each in timings]
        for x in sorted({each.op.grain for each in timings})
    }


def _in_waves(timings: Sequence[Timing], gpu: Gpu) -> tuple[dict[float, list[float]], list[float]]:
    """(seconds in waves of 1 and of RESIDENT blocks a multiprocessor at the whole roof, those of partial results)."""
    alone, full, combined = [], [], []
    for each in timings:
        if each.op.flash_grid is None:
            raise ValueError(f"{each.op.kernel}: a call that says nothing of its thread blocks")
        waves = each.op.flash_grid.on(gpu.sm_count)
        of_one_s = each.roof_s * gpu.sm_count / waves.thread_blocks
        alone.append(of_one_s * waves.alone)
        full.append(of_one_s * waves.full * RESIDENT)
        combined.append(waves.combined_bytes / gpu.vram_read.rate.value)
    columns = {1.0: alone, float(RESIDENT): full}
    return {held: column for held, column in columns.items() if any(column)}, combined


# Operations of thread blocks

FACTOR_4, FACTOR_2 = math.log(4), math.log(2)
READ = Prior(logit(0.9), 1.4)
"""Share of the memory's rate that a kernel reaches where bytes hold it, as log-odds: 0.7 to 0.97."""
NEAR_PLAIN = 0.35
"""Deviation of the same from what the kernel of plain caches reaches: at 0.96, 0.94 to 0.97."""
COMBINING = Prior(math.log(0.5), FACTOR_4)
"""Logarithm of the share of the memory's rate for partial results, most of which stay on the chip."""
LATENCY_PART, OPERATIONS_PART = 0.5, 0.3
"""Of the quickest sample, and of the quickest for its work: what latency and operations begin at."""
WORTH = 0.8
"""A form is taken in place of one before it if it lowers the left-out error to this share."""
FEW_ROWS = 2
"""Kinds of thread blocks through which a line always goes."""
SAME = 0.005
"""Left-out errors below this are not told apart."""
HELD = 0.9
"""Of the left-out samples that an interval of 90 % must hold."""
WORDS = {
    "efficiency": "a share of bytes or products at each number of query tokens",
    "operations": "reads beside the operations of programs: so many an element, and more for each query row",
    "rows": "reads beside the operations of programs: a number for each kind of program",
}


class _Bounds(NamedTuple):
    """Seconds of each sample at each roof, all calibrated, no latency."""

    seconds: Array
    rows: Array
    bytes_s: Array
    combined_s: Array
    """Partial results at the memory's rate."""
    elements_s: Array
    """At one operation an element."""


class ThreadBlocks:
    """Where the twin knows how a kernel is cut into thread blocks, reads go on beside the operations of the blocks.

    seconds = latency + partial results / share + max(bytes / share, elements x operations(rows)). The form
    `operations` costs an element so much and so much more for each query row of a block; by `rows`, blocks of each
    number of rows have a number of their own, where that lowers the error of left-out samples by a fifth. Elsewhere
    there is an `efficiency` for each number of query tokens. What the samples do not tell is as the priors have it:
    other formats read as the kernel of plain caches does (`plain_read`).
    """

    def __init__(self, base: HardwareProfile, plain_read: float | None) -> None:
        self.base, self.plain_read = base, plain_read
        self.lines: dict[tuple[float, ...], Rates] = {}
        """Fits with a line of operations, by samples: a number for each kind of block is looked for near them."""

    def fit(self, timings: Sequence[Timing]) -> Rates:
        """By the form that predicts left-out samples best, with a spread whose intervals hold nine of ten of them."""
        if self.base.gpu.instructions is None or any(each.op.split_kv is None for each in timings):
            return self._judged("efficiency", lambda these, _near: least_squares(these, gpu=self.base.gpu), timings)
        tried = {"operations": self._judged("operations", self._operations, timings)}
        if len({_kind(each) for each in timings}) > FEW_ROWS:
            tried["rows"] = self._judged("rows", self._rows, timings)
        best = tried["operations"]
        for rates in tried.values():
            best = rates if max(_error(rates), SAME) < WORTH * _error(best) else best
        return replace(best, tried={name: _error(rates) for name, rates in tried.items()})

    def _operations(self, timings: Sequence[Timing], near: Rates | None) -> Rates:
        known = tuple(each.seconds for each in timings)
        if known not in self.lines:
            self.lines[known] = self._search(timings, near=near, line=None)
        return self.lines[known]

    def _rows(self, timings: Sequence[Timing], near: Rates | None) -> Rates:
        line = self._operations(timings, None if near is None else near.line)
        return self._search(timings, near=near, line=line)

    def _search(self, timings: Sequence[Timing], *, near: Rates | None, line: Rates | None) -> Rates:
        """Latency, shares and operations, fitted in their logarithms; from `near`, a fit of almost the same samples."""
        bounds = self._bounds(timings)
        each, place = np.unique(bounds.rows, return_inverse=True)
        if line is None:
            of_parameters = np.stack([np.ones_like(each), each], axis=1)
            left = OPERATIONS_PART * float(np.min(bounds.seconds / bounds.elements_s))
            counts = [Prior(math.log(left / rows), FACTOR_4) for rows in (1.0, float(each[0]))]
        else:
            of_parameters = np.eye(len(each))
            counts = [Prior(math.log(operations), FACTOR_2) for _, operations in line.operations]
        most_s = max(2 * LEAST_LATENCY_S, LATENCY_SHARE * float(bounds.seconds.min()))
        read = READ if self.plain_read is None else Prior(logit(self.plain_read), NEAR_PLAIN)
        found = minimum(
            partial(_law, bounds, of_parameters[place]),
            [Prior(math.log(LATENCY_PART * most_s), FACTOR_4), COMBINING, read, *counts],
            near=None if near is None else near.found,
        )
        at = found.parameters
        return Rates(
            latency_s=math.exp(at[0]), combine=math.exp(at[1]), at=(1.0,), efficiency=(float(expit(at[2])),),
            operations=tuple(zip(each.tolist(), (of_parameters @ np.exp(at[3:])).tolist(), strict=True)),
            residuals=tuple(found.residuals.tolist()), found=found, line=line,
        )  # fmt: skip

    def _bounds(self, timings: Sequence[Timing]) -> _Bounds:
        gpu = self.base.gpu
        if gpu.instructions is None:
            raise ValueError("operations of thread blocks need a rate of instructions")
        cuts = [each.op.split_kv for each in timings if each.op.split_kv is not None]
        shares = [cut.on(gpu.sm_count) for cut in cuts]
        return _Bounds(
            seconds=np.array([each.seconds for each in timings]),
            rows=np.array([cut.q_rows for cut in cuts], dtype=np.float64),
            bytes_s=np.array([each.op.vram_bytes / gpu.vram_read.rate.value for each in timings]),
            combined_s=np.array([share.combined_bytes / gpu.vram_read.rate.value for share in shares]),
            elements_s=np.array([share.elements / gpu.instructions.rate.value for share in shares]),
        )

    def _judged(
        self, name: str, form: Callable[[Sequence[Timing], Rates | None], Rates], timings: Sequence[Timing]
    ) -> Rates:
        """Fitted on all samples, and held against each sample that it was not fitted on."""
        whole = form(timings, None)
        errors: dict[int, float] = {}
        needed = []
        for left in _folds(timings):
            rates = form([each for number, each in enumerate(timings) if number != left], whole)
            trial = Roofs(changed(self.base, kernels={timings[0].op.kernel: _kernel(rates)}))
            cost = trial.cost(timings[left].op)
            errors[left] = cost.seconds / timings[left].seconds - 1
            needed.append(abs(errors[left]) / _weight(cost) / Z90)
        least = root_mean_square(whole.residuals)
        spread = max(least, float(np.quantile(needed, HELD))) if needed else least
        return replace(
            whole, spread=spread, left_out=errors, note=WORDS[name],
            tried={name: root_mean_square(tuple(errors.values()) or whole.residuals)},
        )  # fmt: skip


def _law(bounds: _Bounds, of_parameters: Array, at: Array, sharpness: float) -> tuple[Array, Array]:
    """Relative residuals and their Jacobian. `of_parameters`: how often each count is in an element of each sample."""
    latency_s, combined_s, share = math.exp(at[0]), bounds.combined_s / math.exp(at[1]), float(expit(at[2]))
    counted = of_parameters * np.exp(at[3:])
    each = counted.sum(axis=1)
    held_s, of_bytes = slower(bounds.bytes_s / share, bounds.elements_s * each, sharpness)
    slopes = [np.full_like(held_s, latency_s), -combined_s, -held_s * of_bytes * (1 - share)]
    of_counts = counted * (held_s * (1 - of_bytes) / each)[:, None]
    jacobian = np.concatenate([np.stack(slopes, axis=1), of_counts], axis=1) / bounds.seconds[:, None]
    return (latency_s + combined_s + held_s) / bounds.seconds - 1, jacobian


def _error(rates: Rates) -> float:
    """Root mean square of the left-out errors; of the residuals where nothing could be left out."""
    return root_mean_square(tuple((rates.left_out or {}).values()) or rates.residuals)


def _weight(cost: Cost) -> float:
    """Relative standard deviation of a cost whose kernel's rates err by 1, independently."""
    latencies = len(cost.latency_rates) * cost.latency_s**2
    return math.sqrt(latencies + cost.bound_s**2) / cost.seconds


def _kernel(rates: Rates) -> Kernel:
    """Rates without a history."""
    nothing = {"spread": 0.0, "n": 1, "source": "measured", "date": "2026-01-01"}
    return msgspec.convert(rates.entry("query_tokens", nothing), Kernel)


def _kind(timing: Timing) -> float:
    """What samples of one kind share: query rows of a thread block where they are known, else query tokens."""
    return timing.op.split_kv.q_rows if timing.op.split_kv is not None else timing.op.grain


def _folds(timings: Sequence[Timing]) -> Iterator[int]:
    """Samples to leave out, one at a time: each of whose kind there are others."""
    kinds = [_kind(each) for each in timings]
    for number, kind in enumerate(kinds):
        if kinds.count(kind) > 1 and len(timings) > 2:
            yield number

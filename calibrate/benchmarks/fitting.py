"""Fitting kernels' shares to points: least squares of relative errors, with what was known before beside them.

What points leave as uncertain as it was stays as it was: a fit is of the few parameters that they determine.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.benchmarks.asking import Asked, Evidence
from calibrate.benchmarks.parameters import Kernels, Parameter, Values, kernels_of
from calibrate.benchmarks.predicted import breakdown_of, ops_of, seconds_of, told_of
from hwprofiles import HardwareProfile
from twin.cost.roofline import Roofs
from twin.errors import BadFile
from twin.units import format_seconds

LEAST_NOISE = 0.005
"""Relative error at the least of a figure beside others of its run."""
ANOTHER_DAY = 0.02
"""The same of all figures of a run together: on the same card, warmer or cooler, an hour later."""
BEYOND = 3.0
"""Deviations from which on two figures of one question contradict each other."""
DETERMINED = 0.8
"""Share of its spread before that a parameter may keep to count as determined; of two that one point cannot tell apart
each keeps 0.7."""
OUTLIER = 3.0
"""Deviations beyond which a residual counts by its size, not by its square."""
PASSES, SETTLED = 20, 1e-4
"""At most, until weights and values agree."""
INSIDE, FAR = 1e-4, 12.0
"""How far from its limits a search begins, and how far a value may go down."""
STEP = 5e-3
"""Of a parameter's logarithm, over which slopes are taken."""
FLOOR_SLACK = 1.02
"""Clocks and memory of a card may be a little above its data sheet's."""
HOLDS, TINY = 0.1, 1e-30
"""Share of a point's variance from which on a parameter is one of those that hold it."""
MATTERS = 0.02
"""What a change moves of some point at the least, to be kept although the points leave it uncertain."""
MOVES = 0.01
"""Per cent of a point's time that one per cent of a parameter moves at the least, for the point to stand behind it."""
STRANGE = 0.25
"""Relative error after the fit from which on a point is told of: no such share explains it."""

MEDIAN_OF_NORMAL = 0.6745
"""Absolute deviation of half of all samples."""

Matrix = NDArray[np.float64]


class Fitted(Struct, frozen=True, kw_only=True):
    """Parameters that points determine, and what is left."""

    kernels: Kernels
    parameters: tuple[Parameter, ...]
    values: tuple[float, ...]
    spreads: tuple[float, ...]
    undetermined: tuple[Parameter, ...]
    points_of: tuple[tuple[str, ...], ...]
    """Ids of the points that a parameter moves, by parameter."""
    before: tuple[float, ...]
    """Seconds predicted of each point before the fit, and after it."""
    after: tuple[float, ...]


def _whole(every: Sequence[Parameter], some: Sequence[Parameter], values: Sequence[float]) -> list[float]:
    known = dict(zip(some, values, strict=True))
    return [known.get(parameter, 0.0) for parameter in every]


def fit(found: Evidence) -> Fitted:
    """The parameters that points determine. BadFile where points contradict each other or physics."""
    check_alike(found.asked)
    kernels = kernels_of(found.machine, [op for asked in found.asked for op in ops_of(asked, found.machine)])
    search = _Search(found.asked, kernels)
    _check_floor(found.asked, kernels.at(search.nothing))
    every, slopes = search.minimum(kernels.parameters)
    spreads = search.spreads(kernels.parameters, every, slopes)
    matters = np.max(np.abs(slopes * every), axis=0, initial=0.0) > MATTERS
    chosen = [
        at
        for at, each in enumerate(kernels.parameters)
        if spreads[at] < DETERMINED * each.spread or matters[at]
    ]  # fmt: skip
    fitted, slopes = search.minimum([kernels.parameters[at] for at in chosen])
    moves = np.abs(slopes) > MOVES
    told = [(at, value, own) for at, value, own in zip(chosen, fitted, moves.T, strict=True) if own.any()]
    parameters = tuple(kernels.parameters[at] for at, _, _ in told)
    values = tuple(float(value) for _, value, _ in told)
    ids = [asked.point.id for asked in found.asked]
    whole = _whole(kernels.parameters, parameters, values)
    return Fitted(
        kernels=kernels, parameters=parameters, values=values, spreads=tuple(float(spreads[at]) for at, _, _ in told),
        undetermined=tuple(each for each in kernels.parameters if each not in parameters),
        points_of=tuple(tuple(id_ for id_, moved in zip(ids, own, strict=True) if moved) for _, _, own in told),
        before=tuple(search.seconds(search.nothing)), after=tuple(search.seconds(whole)),
    )  # fmt: skip


class _Search:
    """Points as a function of parameters."""

    def __init__(self, asked: Sequence[Asked], kernels: Kernels) -> None:
        self.asked, self.kernels = asked, kernels
        self.measured = np.array([each.point.seconds for each in asked])
        self.noise = np.array([max(LEAST_NOISE, each.point.spread) for each in asked])
        self.nothing = [0.0] * len(kernels.parameters)
        self.by_sums = np.ones(len(asked))
        """What a simulation of a served workload takes, over the sums of its passes: its schedule hangs on no rate."""

    def simulate(self, some: Sequence[Parameter], values: Values) -> None:
        """Hold the sums of served workloads to simulations of them."""
        machine = self.kernels.at(_whole(self.kernels.parameters, some, [float(value) for value in values]))
        for at, each in enumerate(self.asked):
            if each.point.requests:
                self.by_sums[at] = seconds_of(each, machine) / breakdown_of(each, Roofs(machine, strict=False)).seconds

    def seconds(self, values: Sequence[float]) -> list[float]:
        """Of each point, predicted with all parameters so."""
        machine = self.kernels.at(values)
        return [seconds_of(each, machine) for each in self.asked]

    def errors(self, some: Sequence[Parameter], values: Values) -> Values:
        """Logarithm of predicted over measured."""
        whole = _whole(self.kernels.parameters, some, [float(value) for value in values])
        roofs = Roofs(self.kernels.at(whole), strict=False)
        sums = np.array([breakdown_of(each, roofs).seconds for each in self.asked])
        return np.asarray(np.log(sums * self.by_sums / self.measured))

    def slopes(self, some: Sequence[Parameter], values: Values) -> Matrix:
        """Of the errors, by parameter: to both sides, since a share at its roof moves them to one only."""
        columns = [
            (self.errors(some, values + step) - self.errors(some, values - step)) / (2 * STEP)
            for step in STEP * np.eye(len(some))
        ]
        return np.array(columns).T.reshape(len(self.asked), len(some))

    def minimum(self, some: Sequence[Parameter]) -> tuple[Values, Matrix]:
        """(values that explain the points best, slopes of the errors there)."""
        if not some:
            return np.zeros(0), np.zeros((len(self.asked), 0))
        before = np.array([parameter.spread for parameter in some])
        most = np.array([parameter.most for parameter in some])
        found, weights = np.minimum(0.0, most - INSIDE), np.ones(len(self.asked))
        for _ in range(PASSES):
            self.simulate(some, found)
            scale = np.sqrt(weights) / self.noise

            def residuals(values: Values, scale: Values = scale) -> Values:
                return np.concatenate([self.errors(some, values) * scale, values / before])

            def jacobian(values: Values, scale: Values = scale) -> Matrix:
                return np.concatenate([self.slopes(some, values) * scale[:, None], np.diag(1 / before)])

            limits = np.full(len(some), -FAR), most
            answer = least_squares(residuals, found, jac=jacobian, bounds=limits, xtol=1e-6, ftol=1e-9, gtol=1e-9)
            moved, found = float(np.max(np.abs(answer.x - found))), np.asarray(answer.x)
            off = np.abs(self.errors(some, found)) / self.noise
            weights = np.minimum(1.0, OUTLIER / np.maximum(off, OUTLIER))
            if moved < SETTLED:
                break
        return found, self.slopes(some, found)

    def spreads(self, some: Sequence[Parameter], values: Values, slopes: Matrix) -> Values:
        """What is left of each parameter's spread.

        A prediction takes rates as independent. Those that points do not tell apart err against each other, so that
        together they would claim less than is known: their spreads are scaled to what the points that they hold say of
        all of them, by the point that says least.
        """
        misfit = float(np.median(np.abs(self.errors(some, values) / self.noise))) / MEDIAN_OF_NORMAL
        noise = self.noise * max(1.0, misfit)
        before = np.array([parameter.spread for parameter in some])
        rows = np.concatenate([slopes / noise[:, None], np.diag(1 / before)])
        covariance = np.linalg.inv(rows.T @ rows)
        alone = np.sqrt(np.diag(covariance))
        variances = (slopes * alone) ** 2
        together = np.sum(slopes @ covariance * slopes, axis=1)
        apart = np.maximum(np.sum(variances, axis=1), TINY)
        holds = variances > HOLDS * apart[:, None]
        scale = np.max(np.where(holds, np.sqrt(together / apart)[:, None], 0.0), axis=0)
        scaled = np.where(np.any(holds, axis=0), alone * np.minimum(scale, 1.0), alone)
        return np.asarray(np.hypot(scaled, ANOTHER_DAY))


def check_alike(asked: Sequence[Asked]) -> None:
    """BadFile where two figures of one question differ by more than their spreads."""
    alike: dict[tuple[object, ...], list[Asked]] = {}
    for each in asked:
        point = each.point
        sizes = (point.kv_tokens, point.prompt_tokens, point.steps, point.batch, point.requests)
        alike.setdefault((each.case.question, point.metric, *sizes), []).append(each)
    for group in alike.values():
        for (first, _), (second, _) in combinations(group, 2):
            noise = math.hypot(*(max(ANOTHER_DAY, each.spread) for each in (first, second)))
            if abs(math.log(first.seconds / second.seconds)) > BEYOND * noise:
                told = " and ".join(f"{each.id}: {format_seconds(each.seconds)}" for each in (first, second))
                hint = "they are no evidence together: leave out the one that was disturbed"
                raise BadFile(f"two figures of one question contradict each other: {told}", hint=hint)


def _check_floor(asked: Sequence[Asked], machine: HardwareProfile) -> None:
    for each in asked:
        floor_s, seconds = told_of(each, machine).floor_s if not each.point.requests else 0.0, each.point.seconds
        if seconds * FLOOR_SLACK < floor_s:
            told = (
                f"{each.point.id}: {format_seconds(seconds)} is less than {machine.name} can, {format_seconds(floor_s)}"
            )
            hint = "another model, weights or machine than the file's, or tokens from a draft or a prefix cache"
            raise BadFile(f"{told}, at its data sheet's peaks", hint=hint)

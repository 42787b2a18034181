"""The numbers of a machine that points can set: by how much a kernel's share or latency is changed, and where.

A share is changed as a whole around the places at which points ask for it, as far as HELD times away; from FADED times
away on it is as it was. Only shares over tokens of a pass are set in several places: a decode step says nothing of a
prefill, but much of a decode step over a longer context. A roof that is assumed can be set, too, up to its peak: no
share is above it.

Products with weights are changed together, whatever the weights' format and whether experts are chosen: a step's time
cannot tell them apart.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import pairwise

import numpy as np
from msgspec import UNSET, Struct
from msgspec.structs import force_setattr, replace
from numpy.typing import NDArray

from calibrate.benchmarks.start import Start, start_of
from hwprofiles import HardwareProfile
from hwprofiles.profile import RESIDENT_PROGRAMS, Gpu, Kernel, Roof
from hwprofiles.rates import CLOSEST, Curve
from twin.operations.ops import Op

Values = NDArray[np.float64]
"""Logarithms of the factors by which parameters are changed."""

APART = 8.0
"""Ratio of neighbouring places from which on they are set apart."""
HELD, FADED = 16.0, 64.0
LEAST_PLACE, LEAST_SHARE = 1e-3, 1e-6
NO_CHANGE = 0.0
PRODUCTS = ("linear", "experts")


class Parameter(Struct, frozen=True, kw_only=True):
    """Shares of kernels around some places, or with none a latency; or a roof by its name."""

    kernels: tuple[str, ...]
    places: tuple[float, float] | None = None
    over: str = ""
    spread: float
    """What is known before: relative."""
    most: float = math.inf
    """As far as it may be changed: a share to the whole roof, an assumed roof to its peak."""

    @property
    def is_roof(self) -> bool:
        """Whether it is a roof of the machine, not of a kernel."""
        return "/" not in self.kernels[0]

    @property
    def where(self) -> str:
        """Its places, in words; empty where it has none."""
        if self.places is None:
            return ""
        low, high = self.places
        at = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return f"{at} {self.over.replace('_', ' ')}"

    def __str__(self) -> str:
        named = ", ".join(self.kernels)
        if self.places is None:
            return named if self.is_roof else f"{named}, latency"
        return f"{named} at {self.where}"


class Kernels(Struct, frozen=True, kw_only=True):
    """A machine with its kernels and those that it lacks, and the parameters among them."""

    machine: HardwareProfile
    starts: dict[str, Start]
    parameters: tuple[Parameter, ...]

    def at(self, values: Sequence[float] | Values) -> HardwareProfile:
        """The machine with its parameters changed."""
        made = self._with(self.changed(self.parameters, values))
        force_setattr(made, "gpu", self.gpu_at(self.parameters, values))
        return made

    def gpu_at(self, parameters: Sequence[Parameter], values: Sequence[float] | Values) -> Gpu:
        """The device with its assumed roofs changed."""
        gpu = self.machine.gpu
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.is_roof:
                gpu = _with_roof(gpu, parameter.kernels[0], math.exp(float(value)))
        return gpu

    def _with(self, kernels: dict[str, Kernel]) -> HardwareProfile:
        """Unchecked: a search asks often."""
        other = copy(self.machine)
        force_setattr(other, "kernels", self.machine.kernels | kernels)
        return other

    def changed(self, parameters: Sequence[Parameter], values: Sequence[float] | Values) -> dict[str, Kernel]:
        """All kernels that points ask for, those of `parameters` changed by their values."""
        kernels = {key: start.kernel for key, start in self.starts.items()}
        by_kernel: dict[str, list[tuple[Parameter, float]]] = {}
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.is_roof:
                continue
            for key in parameter.kernels:
                by_kernel.setdefault(key, []).append((parameter, float(value)))
        for key, own in by_kernel.items():
            kernels[key] = _changed(kernels[key], own)
        return kernels


def kernels_of(machine: HardwareProfile, ops: Iterable[Op]) -> Kernels:
    """Of all ops that points are made of. A read that may have a kernel of its own has none where none is known."""
    places: dict[str, set[float]] = {}
    roofs: dict[str, None] = {"vram": None}
    for op in ops:
        if op.flops:
            roofs[f"tensor.{op.dtype}"] = None
        if op.kernel in machine.kernels or not op.or_plain:
            places.setdefault(op.kernel, set()).add(float(op.grain))
    starts = {key: start for key in sorted(places) if (start := start_of(machine, key)) is not None}
    alike: dict[tuple[str, ...], list[str]] = {}
    for key, start in starts.items():
        operation, curve = key.partition("/")[0], start.kernel.efficiency
        together = operation in PRODUCTS and curve is not None and curve.over == "tokens"
        alike.setdefault(("products",) if together else (key,), []).append(key)
    parameters = [each for keys in alike.values() for each in _parameters(keys, starts, places)]
    for name in roofs:
        roof = roof_of(machine.gpu, name)
        if roof is not None and roof.rate.source == "datasheet" and roof.rate.spread:
            most = math.log(roof.datasheet.value / roof.rate.value)
            parameters.append(Parameter(kernels=(name,), spread=roof.rate.spread, most=most))
    return Kernels(machine=machine, starts=starts, parameters=tuple(parameters))


def roof_of(gpu: Gpu, name: str) -> Roof | None:
    """The device's memory or the tensor roof of a type, by the names of their rates."""
    return gpu.vram_read if name == "vram" else gpu.tensor.get(name.partition(".")[2])


def _with_roof(gpu: Gpu, name: str, factor: float) -> Gpu:
    roof = roof_of(gpu, name)
    if roof is None:
        return gpu
    value = min(roof.datasheet.value, roof.rate.value * factor)
    changed = replace(roof, rate=replace(roof.rate, value=value))
    if name == "vram":
        return replace(gpu, vram_read=changed)
    return replace(gpu, tensor=gpu.tensor | {name.partition(".")[2]: changed})


def _parameters(keys: Sequence[str], starts: Mapping[str, Start], places: Mapping[str, set[float]]) -> list[Parameter]:
    """Of kernels that are changed together: one where their places are near each other."""
    spread, curve = max(starts[key].spread for key in keys), starts[keys[0]].kernel.efficiency
    if curve is None:
        return [Parameter(kernels=tuple(keys), spread=spread)]
    found = sorted((place, key) for key in keys for place in places[key])
    groups = [[found[0]]]
    for (before, _), (place, key) in pairwise(found):
        if curve.over == "tokens" and place / before >= APART:
            groups.append([])
        groups[-1].append((place, key))
    if curve.over == RESIDENT_PROGRAMS:
        groups = [[(place, keys[0]) for place in curve.at]]
    return [
        Parameter(
            kernels=tuple(dict.fromkeys(sorted(key for _, key in group))), places=(group[0][0], group[-1][0]),
            over=curve.over, spread=spread, most=max(-math.log(_share(starts[key], place)) for place, key in group),
        )
        for group in groups
    ]  # fmt: skip


def _share(start: Start, place: float) -> float:
    curve = start.kernel.efficiency
    return curve(place) if curve is not None else 1.0


def _changed(kernel: Kernel, own: Sequence[tuple[Parameter, float]]) -> Kernel:
    if kernel.efficiency is not None:
        return replace(kernel, efficiency=changed_curve(kernel.efficiency, own))
    if kernel.latency is None:
        return kernel
    return replace(kernel, latency=replace(kernel.latency, value=kernel.latency.value * math.exp(own[0][1])))


def changed_curve(curve: Curve, own: Sequence[tuple[Parameter, float]]) -> Curve:
    """The curve with its share changed around the parameters' places, as far as a share may go."""
    knots = _knots(own)
    at = _places(curve, knots)
    shares = [min(1.0, max(LEAST_SHARE, curve(place) * math.exp(_between(knots, place)))) for place in at]
    return replace(curve, at=at, efficiency=tuple(shares), spreads=UNSET)


def _knots(own: Sequence[tuple[Parameter, float]]) -> list[tuple[float, float]]:
    """Places with the logarithm of the factor there: held around those of points, then fading to none."""
    inside = sorted({(place, value) for parameter, value in own for place in parameter.places or ()})
    for (low, low_value), (high, high_value) in pairwise(tuple(inside)):
        if high > low * HELD**2:
            middle = math.sqrt(low * high), (low_value + high_value) / 2
            inside += [(low * HELD, low_value), middle, (high / HELD, high_value)]
    inside.sort()
    (first, first_value), (last, last_value) = inside[0], inside[-1]
    return [
        (first / FADED, NO_CHANGE), (first / HELD, first_value), *inside, (last * HELD, last_value),
        (last * FADED, NO_CHANGE),
    ]  # fmt: skip


def _places(curve: Curve, knots: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Those of both that tell anything; a curve of few places gets more, since its share is no longer straight."""
    wanted = sorted({*curve.at, *(place for place, _ in knots if place >= LEAST_PLACE)})
    kept = [wanted[0]]
    for place in wanted[1:]:
        if place > kept[-1] * (1 + 2 * CLOSEST):
            kept.append(place)
    return tuple(kept)


def _between(knots: Sequence[tuple[float, float]], place: float) -> float:
    """Linear in the logarithm of the place."""
    logs = [math.log(each) for each, _ in knots]
    return float(np.interp(math.log(place), logs, [value for _, value in knots]))

"""What an operation says of itself: how it is counted, timed, calibrated, validated and fitted; and a case of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from calibrate.fit import Fit
from calibrate.machine.description import Machine
from twin.engines.twin import QUANTISED, RULES
from twin.formats import kv_format
from twin.operations.ops import Program

Value = int | float | str
Point = Mapping[str, Value]
"""One size of an operation: its parameters by name."""
Group = Literal["grid", "long_curve", "formats", "operations"]
"""Cases that are measured together and kept with one history."""
FORMATS = ("bf16", "fp16", *QUANTISED)
"""Cache formats that are read whole: what this project's kernels keep, fp32 apart."""
WORST_ERROR = {"fp16": 5e-3, "bf16": 2e-2, "fp32": 1e-3}
"""Relative error against float64 that is still called right, by the type that is computed in: rounding of the result
and of its sums. Where a point names none, its outputs are in half precision: that of bf16."""
MOST = 2**31
"""Tokens and other sizes of a point, at the most."""
LEAST_CAPABILITY = (8, 0)
"""Of kernels that compute in bf16."""


class Tolerance(NamedTuple):
    """How far a prediction may be from a measurement, as a share of it."""

    share: float
    reason: str


class Points(NamedTuple):
    """Sizes for a GPU and for a processor, cheapest first; the quick ones are some of them, or smaller."""

    gpu: tuple[Point, ...] = ()
    gpu_quick: tuple[Point, ...] = ()
    cpu: tuple[Point, ...] = ()
    cpu_quick: tuple[Point, ...] = ()

    def of(self, *, cuda: bool, quick: bool) -> tuple[Point, ...]:
        """Those of a kind of device and of a mode."""
        if cuda:
            return self.gpu_quick if quick else self.gpu
        return self.cpu_quick if quick else self.cpu

    def every(self) -> tuple[Point, ...]:
        """Of all devices and modes, each once."""
        found = {tuple(sorted(point.items())): point for points in self for point in points}
        return tuple(found.values())


KV_DTYPE = "fp16"
"""Of planes of sparse attention that are measured here, as `realkernels.caches.qsa.DTYPE` has it."""
NO_POINTS = Points()


class Parameter(NamedTuple):
    """A name that a point may have."""

    name: str
    told: str = "{}"
    """How a case's id tells it."""
    optional: bool = False
    least: int = 1
    """Of a number."""
    choices: tuple[str, ...] | None = None
    """Of a text; None: it is a number. Empty: numbers with an x between them."""

    def check(self, value: object) -> None:
        """Raise ValueError where this is no value of it."""
        if self.choices is None:
            right = isinstance(value, int) and self.least <= value <= MOST
            wanted = f"a whole number from {self.least} to {MOST}"
        else:
            numbers = isinstance(value, str) and all(word.isdigit() and int(word) for word in value.split("x"))
            right = value in self.choices if self.choices else numbers
            wanted = " or ".join(self.choices) or "numbers with an x between them"
        if not right:
            raise ValueError(f"{self.name} is {value!r}, not {wanted}")


class Timed(NamedTuple):
    """The class that is timed, one of `realkernels/timed/`, and what it is made over; see `timing.py`."""

    module: str
    name: str
    over: Literal["format", "planes", "blocks", "layer", "rows", "table", "products"]
    sizes: tuple[str, ...]
    """Parameters that its constructor takes by the same names."""
    fresh: bool = False
    """Whether inputs are renewed before each repeat: a second run would find the first one's data in a cache."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A row of the table."""

    name: str
    """The metric of its cases."""
    parameters: tuple[Parameter, ...]
    """In the order in which a case's id tells them."""
    probes: tuple[str, ...] = ()
    """Parameters by whose values points are sorted into probes: what has a reason of its own not to run."""
    lower: Callable[[Point, str], Program]
    """(point, type of the device's planes for sparse attention) -> what one call is in a prediction."""
    timed: Timed
    calibrated: Points = NO_POINTS
    of_device: Callable[[int], tuple[Point, ...]] = lambda _multiprocessors: ()
    """More of these for a GPU of so many multiprocessors."""
    held_out: Mapping[Group, Points] = field(default_factory=dict)
    """Points that no rate is fitted on."""
    tolerance: Callable[[Point], Tolerance]
    fits: tuple[Fit, ...] = ()
    layered: bool = False
    """Whether a case is `layers` calls, one a layer."""
    rounds_often: float = 1.0
    """How many times the error of one product its results may have."""
    probe_s: Callable[[Point], tuple[float, float]] = lambda _point: (2.0, 6.0)
    """Seconds that the probe of a point takes, quick and full."""
    supported: Callable[[Point, Machine], str] = lambda _point, _machine: ""
    """Empty, or why a point cannot run on a machine."""

    def worst_error(self, point: Point) -> float:
        """Relative error of its results from which on they are wrong."""
        return self.rounds_often * WORST_ERROR[str(point.get("dtype", "bf16"))]

    def check(self, point: Point) -> None:
        """Raise ValueError where a point has an unknown name, lacks one, or holds an impossible value."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name, value in point.items():
            if name not in known:
                raise ValueError(f"{self.name} has no parameter {name}: it has {', '.join(known)}")
            known[name].check(value)
        for parameter in self.parameters:
            if not parameter.optional and parameter.name not in point:
                raise ValueError(f"a case of {self.name} needs {parameter.name}")
        if int(point.get("q_tokens", 0)) > int(point.get("ctx_tokens", 2**62)):
            raise ValueError(f"{point['q_tokens']} new tokens do not end a context of {point['ctx_tokens']} tokens")

    def id(self, point: Point) -> str:
        """Readable and unique."""
        told = [each.told.format(point[each.name]) for each in self.parameters if each.name in point]
        return ".".join((self.name, *told))

    def calibration(self, *, cuda: bool, quick: bool, multiprocessors: int) -> tuple[Point, ...]:
        """Points for a device."""
        more = self.of_device(multiprocessors) if cuda else ()
        return (*self.calibrated.of(cuda=cuda, quick=quick), *more)

    def probe(self, point: Point) -> str:
        """Name of the probe that takes a point."""
        return ".".join((self.name, *(str(point[name]) for name in self.probes if name in point)))


def half_precision(_point: Point, machine: Machine) -> str:
    """Why kernels in bf16 cannot run there; empty where they can."""
    return _lacking("bf16 kernels need", LEAST_CAPABILITY, machine)


def format_supported(point: Point, machine: Machine) -> str:
    """Why the kernels of a point's cache format cannot run there; empty where they can."""
    name = str(point["format"])
    least = _numbers(RULES.needs.get(name, kv_format(name).min_capability))
    return _lacking(f"{name} needs", max(LEAST_CAPABILITY, least), machine)


def planes_supported(point: Point, machine: Machine) -> str:
    """The same of a cache that is read sparsely: in a format, or of the device's own type."""
    if not machine.is_cuda and point.get("tier") == "host4k":
        return "needs a CUDA device: the CPU's offload tier is a mapped file without a choice of pages"
    return format_supported(point, machine) if "format" in point else ""


def _lacking(what: str, least: tuple[int, ...], machine: Machine) -> str:
    if not machine.is_cuda or _numbers(machine.compute_capability) >= least:
        return ""
    words = ".".join(str(part) for part in least)
    return f"{what} compute capability {words}, this device has {machine.compute_capability}"


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".")) if capability else (0, 0)

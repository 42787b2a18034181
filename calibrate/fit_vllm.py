"""Sets the kernel rates of vLLM on one RTX 3090 that only published end-to-end figures can set, each on rows it names.

Run `python -m calibrate.fit_vllm` to see the values that the shipped profile must hold; a test compares them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.cases import Recorded, RecordedCase, load_recorded
from calibrate.estimates import Asked
from calibrate.figures import FIGURES
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import Kernel

MACHINE = "rtx3090"


class Parameter(Struct, frozen=True, kw_only=True):
    """One point of a kernel's efficiency, and the rows that set it."""

    kernel: str
    at: float
    rows: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel} at {self.at:g}"


def _set(kernel: str, at: float, *rows: str) -> Parameter:
    return Parameter(kernel=kernel, at=at, rows=tuple(f"vllm.{row}" for row in rows))


INT8, INT4, KVARN = "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128"

PARAMETERS = (
    _set("linear/marlin/w4a16", 64, "64short.fp8", f"u93.{INT8}.64short"),
    _set("linear/marlin/w4a16", 2048, "prefill.fp8.1000"),
    _set("attend_dense/flashinfer/fp8", 1, "prefill.fp8.100000"),
    _set(f"append/kvarn/{KVARN}", 1, f"prefill.{KVARN}.1000"),
    _set(f"attend_dense/kvarn/{KVARN}", 1, f"prefill.{KVARN}.100000"),
    _set(f"append/triton/{INT8}", 1, f"u93.{INT8}.prefill1k"),
    _set(f"attend_dense/triton/{INT8}", 1, f"u93.{INT8}.ttft100k"),
    _set(f"append/triton/{INT4}", 1, f"u93.{INT4}.prefill1k"),
    _set(f"attend_dense/triton/{INT4}", 1, f"u93.{INT4}.ttft100k"),
    _set("attend_decode/flashinfer/fp8", 1, "single100k.fp8.tpot"),
    _set("attend_decode/flashinfer/fp8", 4, "mtp112k.fp8.ms"),
    _set(f"attend_decode/kvarn/{KVARN}", 1, f"single100k.{KVARN}.tpot"),
    _set(f"attend_decode/kvarn/{KVARN}", 4, f"mtp112k.{KVARN}.ms"),
    _set(f"attend_decode/triton/{INT8}", 1, f"u93.{INT8}.tpot100k"),
    _set(f"attend_decode/triton/{INT8}", 8, "verify128k.vLLM"),
    _set(f"attend_decode/triton/{INT4}", 1, f"u93.{INT4}.tpot100k"),
    _set(f"attend_decode/split_kv/{INT8}", 8, "spec112k.dflash2-k15-int8.quote.decode"),
    _set(f"attend_decode/split_kv/{INT8}", 16, "dflash.step112k"),
    _set("attend_decode/turboquant/turboquant_4bit_nc", 1, "turbo.decode"),
)

SETTLED, FLAT = 1e-8, 1e-15
"""Where a search ends: logarithm by which its last step moves a parameter at the most, or a slope that is none."""

Values = NDArray[Any]
"""Logarithms of the parameters, in the order of PARAMETERS."""


def shipped(profile: HardwareProfile) -> Values:
    """The parameters as the profile holds them."""
    return np.log([_point(profile.kernels[p.kernel], p.at) for p in PARAMETERS])


def _point(kernel: Kernel, at: float) -> float:
    curve = kernel.efficiency
    if curve is None or at not in curve.at:
        raise ValueError(f"a kernel has no efficiency at {at:g} to fit")
    return curve.efficiency[curve.at.index(at)]


def with_parameters(profile: HardwareProfile, values: Values) -> HardwareProfile:
    """`profile` with the fitted points."""
    kernels = dict(profile.kernels)
    for parameter, value in zip(PARAMETERS, np.exp(values), strict=True):
        curve = kernels[parameter.kernel].efficiency
        if curve is None:
            raise ValueError(f"{parameter.kernel} has no efficiency to fit")
        points = list(curve.efficiency)
        points[curve.at.index(parameter.at)] = min(1.0, float(value))
        changed = replace(curve, efficiency=tuple(points))
        kernels[parameter.kernel] = replace(kernels[parameter.kernel], efficiency=changed)
    return replace(profile, kernels=kernels)


class Rows:
    """Predictions of recorded rows as functions of the parameters."""

    def __init__(self, recorded: Recorded, profile: HardwareProfile) -> None:
        self.recorded, self.profile = recorded, profile

    def logarithms(self, ids: Sequence[str], values: Values) -> Values:
        """Logarithm of predicted over measured, for each row."""
        profile = with_parameters(self.profile, values)
        return np.array([self._logarithm(id_, profile) for id_ in ids])

    def _logarithm(self, id_: str, profile: HardwareProfile) -> float:
        case = self.recorded.case_of[id_]
        return float(np.log(predicted(case, profile) / self.recorded.row_of[id_].middle))


def predicted(case: RecordedCase, profile: HardwareProfile) -> float:
    """The prediction of one case, without its interval."""
    asked = Asked(
        question=replace(case.ask, hw=profile.name),
        against=replace(case.against, hw=profile.name) if case.against else None,
        profile=profile,
        workload=case.workload,
        intervals=False,
    )
    return FIGURES[case.figure].estimate(asked).value


def solve(residuals: Callable[[Values], Values], start: Values) -> tuple[Values, Values]:
    """Least squares on relative errors: the parameters and the residuals' Jacobian there."""
    step = np.full(start.shape, 1e-4)
    found = least_squares(
        residuals, start, diff_step=step, x_scale=0.1, bounds=(-12, 0), xtol=SETTLED, ftol=None, gtol=FLAT
    )
    if not found.success:
        raise ArithmeticError(f"the fit of the published rows failed: {found.message}")
    return np.asarray(found.x), np.asarray(found.jac)


def fit(recorded: Recorded | None = None) -> dict[str, float]:
    """The fitted value of each parameter, to the published rows unless others are given."""
    profile = load_profile(MACHINE)
    rows = Rows(recorded or load_recorded(MACHINE), profile)
    ids = [row for parameter in PARAMETERS for row in parameter.rows]
    values, _ = solve(lambda at: rows.logarithms(ids, at), np.minimum(shipped(profile), -1e-3))
    return dict(zip(map(str, PARAMETERS), map(float, np.exp(values)), strict=True))


def main() -> None:
    """Print each parameter with the rows that set it."""
    values = fit()
    for parameter in PARAMETERS:
        print(f"{parameter!s:60s} {values[str(parameter)]:.6g}  from {', '.join(parameter.rows)}")  # noqa: T201


if __name__ == "__main__":
    main()

"""Sets the kernels' rates that only published end-to-end figures can set, each on rows that it names.

Run `python -m calibrate.published.fit [machine ...]` to see what the shipped profiles must hold; tests compare them.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.published.cases import Recorded, RecordedCase, load_recorded
from calibrate.published.recorded import estimate_of
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import Kernel
from hwprofiles.rates import Curve, Rate
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.operations.counts import state_bytes
from twin.units import GIB

BLOG, VLLM = "3x-rtx3090", "rtx3090"

Values = NDArray[Any]
"""Logarithms of a machine's parameters, in the order of PARAMETERS."""
SETTLED, FLAT = 1e-8, 1e-15
"""Where a search ends: logarithm by which its last step moves a parameter at the most, or a slope that is none."""


class Parameter(Struct, frozen=True, kw_only=True):
    """One number of a kernel, and the rows that set it."""

    kernel: str
    at: float | None
    """Point of its efficiency; None: its latency."""
    rows: tuple[str, ...]
    shared: tuple[str, ...] = ()
    """Other kernels that are the same one."""

    def __str__(self) -> str:
        return f"{self.kernel} latency" if self.at is None else f"{self.kernel} at {self.at:g}"


def _set(kernel: str, at: float, *rows: str) -> Parameter:
    return Parameter(kernel=kernel, at=at, rows=tuple(f"vllm.{row}" for row in rows))


INT8, INT4, KVARN = "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128"

PARAMETERS = {
    BLOG: (
        Parameter(kernel="experts/exllamav3/exl3", at=1, rows=("blog.decode_1M",)),
        Parameter(
            kernel="gather_host/exllamav3/fp16", at=None, rows=("blog.decode_fixed",),
            shared=("gather_host_4k/exllamav3/fp16", "gather_rows_host/exllamav3/fp16")
        ),
        Parameter(kernel="experts/exllamav3/exl3", at=2048, rows=("blog.prefill_32k",)),
        Parameter(kernel="attend_sparse/exllamav3/fp16", at=1, rows=("blog.prefill_1M",)),
    ),
    VLLM: (
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
    ),
}  # fmt: skip
"""By machine."""


def shipped(profile: HardwareProfile) -> Values:
    """The machine's parameters as its profile holds them."""
    return np.log([_value(profile.kernels[p.kernel], p.at) for p in PARAMETERS[profile.name]])


def _value(kernel: Kernel, at: float | None) -> float:
    return _latency(kernel).value if at is None else _curve(kernel, at)(at)


def _latency(kernel: Kernel) -> Rate:
    if kernel.latency is None:
        raise ValueError("a kernel has no latency to fit")
    return kernel.latency


def _curve(kernel: Kernel, at: float) -> Curve:
    if kernel.efficiency is None or at not in kernel.efficiency.at:
        raise ValueError(f"a kernel has no efficiency at {at:g} to fit")
    return kernel.efficiency


def with_parameters(profile: HardwareProfile, values: Values) -> HardwareProfile:
    """`profile` with other values of its machine's parameters."""
    kernels = dict(profile.kernels)
    for parameter, value in zip(PARAMETERS[profile.name], np.exp(values), strict=True):
        kernel = _with_value(kernels[parameter.kernel], parameter.at, float(value))
        kernels |= dict.fromkeys((parameter.kernel, *parameter.shared), kernel)
    return replace(profile, kernels=kernels)


def _with_value(kernel: Kernel, at: float | None, value: float) -> Kernel:
    if at is None:
        return replace(kernel, latency=replace(_latency(kernel), value=value))
    curve = _curve(kernel, at)
    points = [min(1.0, value) if point == at else old for point, old in zip(curve.at, curve.efficiency, strict=True)]
    return replace(kernel, efficiency=replace(curve, efficiency=tuple(points)))


class Rows:
    """Errors of some recorded rows as a function of their machine's parameters."""

    def __init__(self, recorded: Recorded, profile: HardwareProfile, cases: Sequence[RecordedCase]) -> None:
        self.profile, self.cases = profile, cases
        self.measured = np.array([recorded.row_of[case.id].middle for case in cases])

    def errors(self, values: Values, rows: Sequence[int] | None = None) -> Values:
        """Logarithm of predicted over measured of each row, or of those at `rows`."""
        profile = with_parameters(self.profile, values)
        wanted = range(len(self.cases)) if rows is None else rows
        told = [estimate_of(self.cases[at], profile, intervals=False).value / self.measured[at] for at in wanted]
        return np.log(told)


def solve(residuals: Callable[[Values], Values], start: Values) -> tuple[Values, Values]:
    """Least squares on relative errors, from within the bounds: the parameters and the residuals' Jacobian there."""
    inside, step = np.minimum(start, -1e-3), np.full(start.shape, 1e-4)
    found = least_squares(
        residuals, inside, diff_step=step, x_scale=0.1, bounds=(-12, 0), xtol=SETTLED, ftol=None, gtol=FLAT
    )
    if not found.success:
        raise ArithmeticError(f"the fit of the published rows failed: {found.message}")
    return np.asarray(found.x), np.asarray(found.jac)


def fit(machine: str, recorded: Recorded | None = None) -> dict[str, float]:
    """The fitted value of each of a machine's parameters, to its published rows unless others are given."""
    profile, recorded = load_profile(machine), recorded or load_recorded(machine)
    cases = [recorded.case_of[row] for parameter in PARAMETERS[machine] for row in parameter.rows]
    values, _ = solve(Rows(recorded, profile, cases).errors, shipped(profile))
    return dict(zip(map(str, PARAMETERS[machine]), map(float, np.exp(values)), strict=True))


def fit_workspace() -> float:
    """Bytes of workspace per device that make 64.35 GiB of loaded VRAM (row blog.vram_model)."""
    case = resolve(Question(ctx_tokens=1, layout="vram"))
    model = case.model
    weights = sum(size for part, size in model.weight_bytes.items() if part != "embedding")
    state = sum(state_bytes(mixer, case.rules.state_element_bytes) * count for mixer, count in model.states.items())
    return (64.35 * GIB - weights - state) / load_profile(BLOG).gpu_count


def main(machines: Sequence[str]) -> None:
    """Print each parameter of the machines named, or of all, with the rows that set it."""
    for machine in machines or PARAMETERS:
        values = fit(machine)
        lines = [(str(p), f"{values[str(p)]:.6g}", ", ".join(p.rows)) for p in PARAMETERS[machine]]
        if machine == BLOG:
            lines.append(("workspace per device", f"{fit_workspace():.0f}", "blog.vram_model"))
        for name, value, rows in lines:
            sys.stdout.write(f"{name:60s} {value}  from {rows}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

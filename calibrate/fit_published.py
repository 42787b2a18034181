"""Sets the few rates that only published end-to-end figures can set, and says which row set which.

Run `python -m calibrate.fit_published` to see the values that the shipped profile must hold; a test compares them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import root

from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import Kernel
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.roofline import Roofs
from twin.operations.counts import layer_parameters, parameters, state_bytes, weight_bytes
from twin.prediction import decode_breakdown, prefill_breakdown
from twin.units import GIB

MACHINE = "3x-rtx3090"
LINEAR = "linear/exllamav3/exl3"
GATHER = "gather_host/exllamav3/fp16"
GATHER_4K = "gather_host_4k/exllamav3/fp16"
GATHER_ROWS = "gather_rows_host/exllamav3/fp16"
SPARSE = "attend_sparse/exllamav3/fp16"


class Target(Struct, frozen=True, kw_only=True):
    """One published row, the parameter that it sets, and how to predict it."""

    row: str
    parameter: str
    published: float
    predict: Callable[[Roofs], float]


def _decode(ctx_tokens: int, layout: str) -> Callable[[Roofs], float]:
    case = resolve(Question(ctx_tokens=ctx_tokens, layout=layout))
    return lambda roofs: 1 / decode_breakdown(case, roofs).seconds


def _decode_drop(roofs: Roofs) -> float:
    return 100 * (1 - _decode(2048, "offload")(roofs) / _decode(2048, "vram")(roofs))


def _prefill(ctx_tokens: int) -> Callable[[Roofs], float]:
    case = resolve(Question(ctx_tokens=ctx_tokens, layout="offload"))
    return lambda roofs: ctx_tokens / prefill_breakdown(case, roofs).seconds


TARGETS = (
    Target(row="blog.decode_1M", parameter=f"{LINEAR} efficiency at 1 token", published=50.7,
           predict=_decode(1_048_320, "offload")),
    Target(row="blog.decode_fixed", parameter=f"{GATHER} latency", published=13.0, predict=_decode_drop),
    Target(row="blog.prefill_32k", parameter=f"{LINEAR} efficiency at 2048 tokens", published=1640.0,
           predict=_prefill(32_768)),
    Target(row="blog.prefill_1M", parameter=f"{SPARSE} efficiency", published=592.0, predict=_prefill(1_048_320)),
)  # fmt: skip


def shipped(profile: HardwareProfile) -> tuple[float, ...]:
    """The four fitted parameters as the profile holds them, in the order of TARGETS."""
    linear, sparse, latency = (
        profile.kernels[LINEAR].efficiency,
        profile.kernels[SPARSE].efficiency,
        profile.kernels[GATHER].latency,
    )
    if linear is None or sparse is None or latency is None:
        raise ValueError("the profile lacks a fitted rate")
    return linear.efficiency[0], latency.value, linear.efficiency[1], sparse.efficiency[0]


def with_parameters(profile: HardwareProfile, values: NDArray[Any]) -> HardwareProfile:
    """`profile` with the four fitted parameters, in the order of TARGETS."""
    one, latency, many, sparse = (float(value) for value in values)
    kernels = dict(profile.kernels)
    kernels[LINEAR] = _with_efficiency(kernels[LINEAR], (one, many))
    kernels[SPARSE] = _with_efficiency(kernels[SPARSE], (sparse,))
    old = kernels[GATHER].latency
    if old is None:
        raise ValueError(f"{GATHER} has no latency to fit")
    kernels[GATHER] = replace(kernels[GATHER], latency=replace(old, value=latency))
    for twin_key in (GATHER_4K, GATHER_ROWS):  # the same exposed latency, published once
        kernels[twin_key] = kernels[GATHER]
    return replace(profile, kernels=kernels)


def _with_efficiency(kernel: Kernel, efficiency: tuple[float, ...]) -> Kernel:
    if kernel.efficiency is None:
        raise ValueError("a kernel without an efficiency cannot be fitted")
    return replace(kernel, efficiency=replace(kernel.efficiency, efficiency=efficiency))


def fit(targets: Sequence[Target] = TARGETS) -> dict[str, float]:
    """The fitted values by parameter: four equations, four unknowns."""
    profile = load_profile(MACHINE)

    def misfit(logarithms: NDArray[Any]) -> NDArray[Any]:
        roofs = Roofs(with_parameters(profile, np.exp(logarithms)))
        return np.array([target.predict(roofs) / target.published - 1 for target in targets])

    found = root(misfit, np.log([0.2, 5e-5, 0.35, 0.5]), tol=1e-10)
    if not found.success:
        raise ArithmeticError(f"the fit of the published rows failed: {found.message}")
    return dict(zip([target.parameter for target in targets], map(float, np.exp(found.x)), strict=True))


def fit_workspace() -> float:
    """Bytes of workspace per device that make 64.35 GiB of loaded VRAM (row blog.vram_model)."""
    case = resolve(Question(ctx_tokens=1, layout="vram"))
    model = case.model
    count = sum(layer_parameters(model, kind) for kind in model.layer_kinds) + parameters(model).head
    state = model.recurrent_layers * state_bytes(model, case.rules.state_element_bytes)
    return (64.35 * GIB - weight_bytes(model, count) - state) / load_profile(MACHINE).gpu_count


def main() -> None:
    """Print each parameter with the row that set it."""
    values = fit()
    for target in TARGETS:
        print(f"{target.parameter:50s} {values[target.parameter]:.6g}  from {target.row} = {target.published:g}")  # noqa: T201
    print(f"{'workspace per device':50s} {fit_workspace():.0f}  from blog.vram_model = 64.35 GiB")  # noqa: T201


if __name__ == "__main__":
    main()

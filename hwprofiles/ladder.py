"""Rates that nobody measured on a machine: carried from other machines, or typical of the operation over all engines.

A kernel's share of the roofs above it is what is carried; the roofs are the asked machine's own. How far such a share
is off is learned by leaving machines and engines out (`calibrate/rungs.py`), never chosen, and kept in `ladder.json`.
"""

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hwprofiles.profile import KERNEL_AXES, HardwareProfile, Kernel
from hwprofiles.rates import Curve, Provenance, Rate

LADDER = Path(__file__).parent / "ladder.json"
SCHEMA = "twin.ladder/1"

Rung = Literal["measured", "carried", "typical"]
RUNGS: tuple[Rung, ...] = ("measured", "carried", "typical")

PLAIN = ("fp16", "f16", "bf16", "fp32", "f32")
"""Formats whose elements a kernel multiplies as they are stored."""

GROUPS: dict[str, tuple[str, ...]] = {
    "products": ("linear", "experts"),
    "attention": ("attend_decode", "attend_dense", "attend_sparse", "attend_latent_decode", "attend_latent_dense",
                  "attend_latent_sparse", "dequantise"),
    "selection": ("scan", "select", "score", "index_tokens", "combine"),
    "reads": ("gather_vram", "gather_host", "gather_host_4k", "gather_rows_host"),
    "states": ("recurrent", "kimi_delta", "mamba", "mamba2", "lightning_attention", "short_convolution"),
    "between products": ("append", "elementwise", "sample"),
    "steps": ("step", "speculate", "piecewise"),
    "collectives": ("all_reduce", "all_gather"),
}  # fmt: skip
"""Operations whose shares are off together, by what a spread is called."""
MANY = " of many tokens"  # of a group, where the tensor cores hold it
GROUP_OF = {operation: group for group, operations in GROUPS.items() for operation in operations}

STAND_INS = {
    "experts": "linear",
    "attend_latent_decode": "attend_decode",
    "attend_latent_dense": "attend_dense",
    "attend_latent_sparse": "attend_dense",
    "index_tokens": "score",
    "gather_host_4k": "gather_host",
    "gather_rows_host": "gather_host",
}
"""What stands for an operation of which no kernel was measured anywhere; a state of any kind is `recurrent`."""


class Learned(Provenance, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far shares of one group are off on one rung: `spread`, from `n` values left out."""

    machines: Annotated[int, Meta(ge=1)]
    engines: Annotated[int, Meta(ge=1)]
    coverage: Annotated[float, Meta(ge=0, le=1)]  # share of those left out that the 90 % interval holds


class Typical(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What kernels of one operation reach over all engines, by whether their format is stored plain."""

    plain: Kernel | None = None
    quantised: Kernel | None = None


class Ladder(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Typical kernels by operation, and the spread of each group on each rung below measured."""

    schema: str
    typical: dict[str, Typical]
    carried_spreads: dict[str, Learned]
    typical_spreads: dict[str, Learned]


class Borrowed(NamedTuple):
    """A kernel's rates on a machine where it was not measured."""

    kernel: Kernel
    rung: Rung
    group: str
    spread: Learned
    products_spread: Learned  # where products of many tokens hold it


@cache
def shipped_ladder() -> Ladder:
    """What is shipped of typical kernels and spreads."""
    return msgspec.json.decode(LADDER.read_bytes(), type=Ladder)


def is_plain(fmt: str) -> bool:
    """Whether elements of that format are multiplied as they are stored."""
    return fmt in PLAIN


def borrowed(
    profile: HardwareProfile,
    key: str,
    *,
    ladder: Ladder | None = None,
    shelf: dict[str, dict[str, Kernel]] | None = None,
) -> Borrowed | None:
    """The kernel `key` as other machines or engines have it; None where no machine runs anything of the kind.

    shelf: kernels by machine, those that are shipped unless given.
    """
    operation, _, fmt = key.split("/")
    group = GROUP_OF.get(operation)
    if group is None:
        return None
    ladder = ladder or shipped_ladder()
    here = profile.name.partition("x-")[2] if profile.name[:1].isdigit() else profile.name
    elsewhere = {machine: kernels[key] for machine, kernels in (shelf or _shelf()).items()
                 if machine != here and key in kernels}  # fmt: skip
    if elsewhere and group in ladder.carried_spreads:
        note = f"carried from {', '.join(sorted(elsewhere))}, as shares of this machine's roofs"
        kernel = averaged(elsewhere.values(), note)
        return _borrowed(kernel, "carried", group, ladder.carried_spreads)
    kernel = _typical(ladder, operation, fmt)
    if kernel is None or group not in ladder.typical_spreads:
        return None
    return _borrowed(kernel, "typical", group, ladder.typical_spreads)


def _borrowed(kernel: Kernel, rung: Rung, group: str, spreads: dict[str, Learned]) -> Borrowed:
    own = spreads[group]
    return Borrowed(kernel, rung, group, own, spreads.get(f"{group}{MANY}", own))


def _typical(ladder: Ladder, operation: str, fmt: str) -> Kernel | None:
    """Of the operation, else of what stands for it; in a format stored alike, else in any."""
    stand_in = "recurrent" if GROUP_OF[operation] == "states" else STAND_INS.get(operation)
    for name in (operation, stand_in):
        if name is not None and name in ladder.typical:
            own = ladder.typical[name]
            kernel = (own.plain or own.quantised) if is_plain(fmt) else (own.quantised or own.plain)
            return kernel if kernel is None else _on_axis(kernel, operation)
    return None


def _on_axis(kernel: Kernel, operation: str) -> Kernel:
    """A stand-in's curve over another quantity than the operation's is a constant: its middle."""
    curve, axis = kernel.efficiency, KERNEL_AXES.get(operation, "tokens")
    if curve is None or curve.over == axis:
        return kernel
    middle = math.exp(sum(map(math.log, curve.efficiency)) / len(curve.efficiency))
    return replace(kernel, efficiency=replace(curve, over=axis, at=(1.0,), efficiency=(middle,)))


def _shelf() -> dict[str, dict[str, Kernel]]:
    """Shipped kernels by the machine that they were measured on."""
    from hwprofiles.store import shipped_kernels  # noqa: PLC0415 - it reads machines by this module's kind

    return shipped_kernels()


def averaged(kernels: Iterable[Kernel], note: str) -> Kernel:
    """The geometric mean of several machines' kernels: each rate over those that have it."""
    several = list(kernels)
    efficiency = _mean_curve([each.efficiency for each in several if each.efficiency is not None], note)
    latency = _mean_rate([each.latency for each in several if each.latency is not None], note)
    combine = _mean_rate([each.combine for each in several if each.combine is not None], note)
    counts = next((each.operations for each in several if each.operations is not None), None)
    return Kernel(efficiency=efficiency, latency=latency, combine=combine, operations=counts)


def _mean_rate(rates: list[Rate], note: str) -> Rate | None:
    if not rates:
        return None
    mean = math.exp(sum(math.log(rate.value) for rate in rates) / len(rates))
    return replace(rates[0], value=mean, spread=_most(rates), source=_source(rates), fitted_on=(), note=note)


def _mean_curve(curves: list[Curve], note: str) -> Curve | None:
    """Over the places of all: outside its own places each holds its outermost value."""
    if not curves:
        return None
    alike = [curve for curve in curves if curve.over == curves[0].over]
    at = sorted({place for curve in alike for place in curve.at})
    means = tuple(math.exp(sum(math.log(curve(place)) for curve in alike) / len(alike)) for place in at)
    told = {"spread": _most(alike), "source": _source(alike), "fitted_on": (), "note": note}
    return replace(alike[0], at=tuple(at), efficiency=means, **told)


def _most(rates: Iterable[Provenance]) -> float:
    return max(rate.spread for rate in rates)


def _source(rates: Iterable[Provenance]) -> str:
    return "measured" if all(rate.source == "measured" for rate in rates) else "published"

"""Rates that nobody measured on a machine: carried from other machines, or typical of the operation over all engines.

A kernel's share of the roofs above it and its latency are what is carried; the roofs are the asked machine's own. How
far such rates are off is learned by leaving machines and engines out (`calibrate/rungs.py`), never chosen, and kept in
`ladder.json` with the rates themselves.
"""

import math
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hwprofiles.profile import CPU_CAPABILITY, KERNEL_AXES, Gpu, HardwareProfile, Kernel
from hwprofiles.rates import Provenance

LADDER = Path(__file__).parent / "ladder.json"
SCHEMA = "twin.ladder/1"

Rung = Literal["measured", "carried", "typical"]
RUNGS: tuple[Rung, ...] = ("measured", "carried", "typical")

PLAIN = ("fp16", "f16", "bf16", "fp32", "f32")
"""Formats whose elements a kernel multiplies as they are stored."""

GROUPS: dict[str, tuple[str, ...]] = {
    "products": ("linear",),
    "experts": ("experts",),
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
GROUP_OF = {operation: group for group, operations in GROUPS.items() for operation in operations}
MANY = " of many tokens"  # of a group, where the tensor cores hold it
LATENCIES = "latencies"  # of all groups: what launches and dependent reads take on a device

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

ANY = "any"  # device


class Learned(Provenance, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far rates of one group are off on one rung: `spread`, from `n` values left out."""

    machines: Annotated[int, Meta(ge=1)]
    engines: Annotated[int, Meta(ge=1)]
    coverage: Annotated[float, Meta(ge=0, le=1)]  # share of those left out that the 90 % interval holds
    half_width: Annotated[float, Meta(ge=0)]  # median of that interval's


class Judged(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What leaving machines out (carried), or engines (typical), shows of one kind of calls or steps."""

    rung: Rung
    of: str
    rows: int
    machines: int
    engines: int
    median_error: float
    coverage: float  # of 90 % intervals
    half_width: float  # of them, median


class Carried(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel over the machines that it was measured on."""

    kernel: Kernel
    machines: tuple[str, ...]
    of_group: bool = True
    """Whether too few machines tell how far it is off: then that is its group's spread, else its own rates' spreads."""


class Typical(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What kernels of one operation reach over all engines, by whether their format is stored plain."""

    plain: Kernel | None = None
    quantised: Kernel | None = None


class Ladder(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rates below measured, and the spread of each group on each rung."""

    schema: str
    carried: dict[str, dict[str, Carried]]  # by kernel, and by likeness of the device
    typical: dict[str, Typical]  # by operation
    whole: Learned
    """How far whole steps are off beside what their kernels are: what runs between kernels, and errors in common."""
    carried_spreads: dict[str, Learned]
    typical_spreads: dict[str, Learned]
    judged: tuple[Judged, ...] = ()


class Borrowed(NamedTuple):
    """A kernel's rates on a machine where it was not measured."""

    kernel: Kernel
    rung: Rung
    group: str
    spreads: dict[str, Learned]  # by group; empty where the kernel's own rates say how far they are off


@cache
def shipped_ladder() -> Ladder:
    """What is shipped of borrowed rates and their spreads."""
    return msgspec.json.decode(LADDER.read_bytes(), type=Ladder)


def is_plain(fmt: str) -> bool:
    """Whether elements of that format are multiplied as they are stored."""
    return fmt in PLAIN


def kind_of(gpu: Gpu) -> str:
    """Of a device: cuda, the cpu, that of a system with one memory (unified), or another maker's card (other)."""
    if gpu.runs_cuda:
        return "cuda"
    if gpu.compute_capability == CPU_CAPABILITY:
        return "cpu"
    return "unified" if gpu.unified_memory else "other"


def likenesses(gpu: Gpu) -> tuple[str, ...]:
    """Devices among which its rates are carried, the likest first: of its compute capability, of its kind, any."""
    kind = kind_of(gpu)
    return (gpu.compute_capability, kind, ANY) if kind == "cuda" else (kind, ANY)


def borrowed(profile: HardwareProfile, key: str, ladder: Ladder | None = None) -> Borrowed | None:
    """The kernel `key` as other machines or engines have it; None where no machine runs anything of the kind."""
    operation, _, fmt = key.split("/")
    group, ladder = GROUP_OF.get(operation), ladder or shipped_ladder()
    if group is None:
        return None
    elsewhere = ladder.carried.get(key)
    if elsewhere:
        found = next(elsewhere[each] for each in likenesses(profile.gpu) if each in elsewhere)
        return Borrowed(found.kernel, "carried", group, ladder.carried_spreads if found.of_group else {})
    kernel = _typical(ladder, operation, fmt)
    return Borrowed(kernel, "typical", group, ladder.typical_spreads) if kernel is not None else None


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

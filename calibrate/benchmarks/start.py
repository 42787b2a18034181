"""Where a fit begins: a kernel's rates as the machine has them, else as is usual, and how far they may be moved."""

from typing import NamedTuple

from hwprofiles import HardwareProfile
from hwprofiles.profile import KERNEL_AXES, Kernel
from hwprofiles.rates import Curve

USUAL = 0.7
"""Share of a roof that a kernel reaches where nobody measured one."""
USUAL_SPREAD = 0.4
DATE = "2026-12-01"
AT_LEAST = 0.2
"""Relative deviation of a share before the benchmark speaks: the machine at hand is not the one that set the rate, or
not in the same state, however well that was known there."""


class Start(NamedTuple):
    """A kernel before the fit."""

    kernel: Kernel
    spread: float
    measured: bool
    """Whether the profile has it."""


def start_of(profile: HardwareProfile, key: str) -> Start | None:
    """None for a kernel of which nothing is known, which only a latency can be."""
    own = profile.kernels.get(key)
    if own is not None:
        rate = own.efficiency or own.latency
        return Start(own, max(AT_LEAST, rate.spread if rate else 0.0), measured=True)
    curve = Curve(
        over=KERNEL_AXES.get(key.split("/", maxsplit=1)[0], "tokens"), at=(1.0,), efficiency=(USUAL,),
        spread=USUAL_SPREAD, n=1, source="datasheet", date=DATE, note="assumed: nobody measured it",
    )  # fmt: skip
    return Start(Kernel(efficiency=curve), USUAL_SPREAD, measured=False)

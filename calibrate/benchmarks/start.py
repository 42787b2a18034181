"""Where a fit begins: a kernel's rates as the machine has them, else borrowed, and how far they may be moved."""

import math
from typing import NamedTuple

from msgspec.structs import replace

from hwprofiles import HardwareProfile
from hwprofiles.ladder import LATENCIES, MANY, Borrowed, Rung, borrowed
from hwprofiles.profile import Kernel

AT_LEAST = 0.2
"""Relative deviation of a share before the benchmark speaks: the machine at hand is not the one that set the rate, or
not in the same state, however well that was known there."""


class Start(NamedTuple):
    """A kernel before the fit."""

    kernel: Kernel
    spread: float
    rung: Rung


def start_of(profile: HardwareProfile, key: str) -> Start | None:
    """None for a kernel of which no machine has anything of the kind."""
    own = profile.kernels.get(key)
    if own is not None:
        rate = own.efficiency or own.latency
        return Start(own, max(AT_LEAST, rate.spread if rate else 0.0), "measured")
    found = borrowed(profile, key)
    return None if found is None else _as_known(found, unissued=profile.gpu.instructions is None)


def _as_known(found: Borrowed, *, unissued: bool) -> Start:
    """A borrowed kernel whose rates are as uncertain as their rung.

    unissued: nobody counted the device's instructions; it is taken to issue as many as the kernel needs.
    """
    groups = (found.group, f"{found.group}{MANY}") if found.kernel.efficiency is not None else (LATENCIES, found.group)
    told = [found.spreads[group].spread for group in groups if group in found.spreads]
    spread = min(1.0, max((AT_LEAST, *told)))
    kernel = replace(found.kernel, operations=None) if unissued else found.kernel
    if kernel.efficiency is not None:
        curve = kernel.efficiency
        kernel = replace(kernel, efficiency=replace(curve, spread=min(1.0, math.hypot(curve.spread, spread))))
    elif kernel.latency is not None:
        latency = kernel.latency
        kernel = replace(kernel, latency=replace(latency, spread=min(1.0, math.hypot(latency.spread, spread))))
    return Start(kernel, spread, found.rung)

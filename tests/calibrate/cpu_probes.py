"""Probes by their names, and a context in which they run on this processor."""

from pathlib import Path
from typing import Any

from calibrate.machine.description import describe
from calibrate.probes import Context, Probe, all_probes


def probe_of(name: str) -> Probe:
    return next(probe for probe in all_probes() if probe.name == name)


def context(folder: Path, **changes: Any) -> Context:
    from realkernels.device import CpuDevice

    backend = CpuDevice(threads=1)
    fields = {"machine": describe("cpu", dtype="fp16"), "folder": folder, "quick": True, "estimate_s": 0.01}
    return Context(backend=backend, **fields | changes)

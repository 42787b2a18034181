"""Some of a calibration's probes alone, one after the other, and what a report keeps of them."""

import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from calibrate.machine.description import describe
from calibrate.operations.operation import KV_DTYPE
from calibrate.probes import CannotRun, Context, Machine, Probe, ProbeRecord

PATIENCE = 4
"""Times the estimate that a probe may take before it leaves points out: nothing waits behind these."""


def probed(probes: Iterable[Probe], device: str, *, quick: bool) -> tuple[Machine, dict[str, ProbeRecord]]:
    """(machine, a record a probe), told as it goes. A probe that fails is told and left out: the others go on."""
    from realkernels.device import open_device  # needs torch

    records = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = open_device(device)
        machine = describe(str(backend.device), dtype=KV_DTYPE)
        for probe in probes:
            reason = probe.supported(machine)
            context = Context(
                machine=machine, backend=backend, folder=Path(folder), quick=quick,
                estimate_s=PATIENCE * probe.estimate_s(quick=quick),
            )  # fmt: skip
            begin, samples = time.monotonic(), []
            try:
                samples = probe.run(context) if not reason else []
            except (CannotRun, RuntimeError) as missing:
                reason = f"{type(missing).__name__}: {missing}"
            took = time.monotonic() - begin
            records[probe.name] = ProbeRecord(
                samples=tuple(samples), skipped=reason, left_out=context.left_out, took_s=took
            )
            print(
                f"{probe.name}: {took:.1f} s, {len(samples)} points, {context.left_out} left out {reason}", flush=True
            )
    return machine, records


def reported(machine: Machine, records: Mapping[str, ProbeRecord]) -> dict[str, Any]:
    """Machine and samples as plain data; the device's own number is nobody's business."""
    return {
        "machine": msgspec.to_builtins(machine) | {"device_id": ""},
        "probes": msgspec.to_builtins(dict(records)),
    }

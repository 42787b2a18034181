"""From probe records to a machine's profile in the schema of `hwprofiles`, checked by it, and the record beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from calibrate.fit import Fitter
from calibrate.machine.description import Machine
from calibrate.operations.table import OPERATIONS
from calibrate.probes import ProbeRecord, Sample
from calibrate.rounds import between_calibrations, moment_spread, typical_spread
from calibrate.searches import solve
from hwprofiles.errors import TwinError
from hwprofiles.links import LANES, PCIE_LANE_BYTES_PER_S, link_bytes_per_s
from hwprofiles.profile import LEAST_LATENCY_S, SCHEMA, HardwareProfile

RECORD_SCHEMA = "twin.calibration/1"
LEAST_SPREAD = 0.01
"""No rate is known better than this: the same probes on one H200, a quarter of an hour apart, differ by 1 % in the
median (0.1 % for long kernels, 3 % for selection)."""
SAME = 1e-9
"""Rates nearer than this are equal: a clock's ticks make many that are."""
UNITS = {"tensor": "FLOP/s", "instructions": "op/s"}
"""Of roofs of operations; those of all others are bytes a second."""
NEEDED = ("vram_read", "host_to_device_copy", "device_to_host_copy", "host_to_device_gather", "host_read", "disk_read")


class CannotCalibrate(TwinError, RuntimeError):
    """The machine or this installation cannot be calibrated as it is; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a profile is built from."""

    machine: Machine
    records: Mapping[str, ProbeRecord]
    date: str

    @cached_property
    def typical_spread(self) -> float:
        """Between two moments, of all probes; 0 where everything was measured in one round."""
        return typical_spread(self.records)

    def samples(self, name: str) -> tuple[Sample, ...]:
        """Samples of a probe; none if it did not run."""
        return self.records.get(name, ProbeRecord()).samples

    def kernels(self, bare: HardwareProfile) -> tuple[dict[str, Any], dict[str, Any]]:
        """(rates of every operation that was measured, residuals of each fit), over a profile without kernels."""
        fitter = Fitter(self.records, bare, self.machine.dtype, self.provenance)
        for operation in OPERATIONS:
            fitter.fit(operation)
        return fitter.kernels, fitter.fitted

    def provenance(self, samples: Sequence[Sample], residual: float = 0.0, note: str = "") -> dict[str, Any]:
        """The largest spread of the fit's residuals, of rounds and, in one round, of repeats; the number of repeats."""
        repeats = sorted(sample.spread for sample in samples)
        alike = 0.0 if moment_spread(samples) or not repeats else repeats[len(repeats) // 2]
        spread = max(residual, between_calibrations(samples, self.typical_spread), alike, LEAST_SPREAD)
        count = max(1, sum(sample.n for sample in samples))
        return {"spread": min(1.0, spread), "n": count, "source": "measured", "date": self.date, "note": note}


def build(
    *, machine: Machine, records: Mapping[str, ProbeRecord], name: str, date: str, command: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(profile, record). Raises CannotCalibrate where a probe that every profile needs is missing."""
    evidence = Evidence(machine=machine, records=records, date=date)
    missing = [probe for probe in NEEDED if not evidence.samples(probe)]
    if missing:
        raise CannotCalibrate(f"no profile without {', '.join(missing)}: these probes gave no samples")
    base: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name,
        "summary": f"{machine.name}, calibrated by its own kernels on {date}",
        "gpu_count": 1,
        "gpu": _gpu(evidence),
        "host": _host(evidence),
        "kernels": {},
    }
    bare = checked(base)
    kernels, fitted = evidence.kernels(bare)
    profile = base | {"kernels": kernels}
    checked(profile)
    return profile, _record(evidence, name=name, command=command, fitted=fitted)


def checked(profile: dict[str, Any]) -> HardwareProfile:
    """The profile as the schema reads it. CannotCalibrate names the key that is out of range."""
    try:
        return msgspec.convert(profile, HardwareProfile)
    except (msgspec.ValidationError, ValueError) as wrong:
        raise CannotCalibrate(
            f"the measurements do not make a valid profile: {wrong}", hint="a busy machine? try again"
        ) from None


def _gpu(evidence: Evidence) -> dict[str, Any]:
    machine = evidence.machine
    vram_note = "as the driver reports it" if machine.is_cuda else "one memory serves as device and host"
    return {
        "name": machine.name,
        "compute_capability": machine.compute_capability,
        "sm_count": machine.sm_count,
        "vram": _stated(machine.device_bytes, evidence.date, vram_note),
        "vram_read": _roof(evidence, "vram", evidence.samples("vram_read")),
        "tensor": _tensor(evidence),
        "h2d": _copy_link(evidence, "host_to_device_copy", _run_lengths(evidence)),
        "d2h": _copy_link(evidence, "device_to_host_copy", None),
        "link": link_name(machine),
        **instructions_roof(evidence),
        **({} if machine.is_cuda else {"unified_memory": True}),
    }


def link_name(machine: Machine) -> str:
    """As `hwprofiles/links.py` has it; empty where nobody tells."""
    generation, lanes = (machine.smi.get(f"pcie.link.{what}.max", "") for what in ("gen", "width"))
    known = generation.isdigit() and int(generation) in PCIE_LANE_BYTES_PER_S and lanes in map(str, LANES)
    return f"PCIe {generation}.0 x{lanes}" if known else ""


def instructions_roof(evidence: Evidence) -> dict[str, Any]:
    """Under its key; nothing where the device was not asked for it."""
    samples = evidence.samples("instructions")
    return {"instructions": _roof(evidence, "instructions", samples)} if samples else {}


def _stated(value: float, date: str, note: str) -> dict[str, Any]:
    return {"value": value, "unit": "B", "spread": 0.0, "n": 1, "source": "measured", "date": date, "note": note}


def _roof(evidence: Evidence, kind: str, samples: Sequence[Sample], *, note: str = "") -> dict[str, Any]:
    """The best median over sizes and shapes: what the others fall short of is theirs to explain."""
    unit = UNITS.get(kind, "B/s")
    best = _quickest(samples, kind)
    value = _per_second(best, kind)
    rate = {"value": value, "unit": unit, **evidence.provenance([best], note=note or _at(best))}
    return {"rate": rate, "datasheet": peak(kind, value, unit, evidence.machine, date=evidence.date)}


def _quickest(samples: Sequence[Sample], kind: str) -> Sample:
    """The one of the highest rate; of equals the first by where it was taken, whatever order they come in."""
    highest = max(_per_second(sample, kind) for sample in samples)
    return min((sample for sample in samples if _per_second(sample, kind) >= (1 - SAME) * highest), key=_at)


def _per_second(sample: Sample, kind: str) -> float:
    return (sample.flops if kind in UNITS else sample.moved_bytes) / sample.median_s


def _at(sample: Sample) -> str:
    return ", ".join(f"{key} {value}" for key, value in sample.at.items())


def _tensor(evidence: Evidence) -> dict[str, Any]:
    """By operand type. The CPU's kernels widen 16-bit planes to fp32, so the better of the two rates is their roof."""
    found: dict[str, list[Sample]] = {}
    for name in evidence.records:
        if name.startswith("product."):
            found[name.removeprefix("product.")] = [s for s in evidence.samples(name) if s.at["tokens"] != 1]
    widened = [] if evidence.machine.is_cuda else found.get("fp32", [])
    return {
        dtype: _roof(evidence, "tensor", [*samples, *widened]) for dtype, samples in found.items() if samples or widened
    }


def _copy_link(evidence: Evidence, name: str, run_length: dict[str, Any] | None) -> dict[str, Any]:
    """Rate and latency of one copy of a queue; a queue's own start is not part of either."""
    samples = _copies(evidence, name)
    line = copies_line(samples)[1]
    longest = max(float(sample.at["copy_bytes"]) for sample in samples)
    long_run = {"over": "run_bytes", "at": [longest], "efficiency": [1.0]}
    long_run |= evidence.provenance(samples, line.spread, "whole copies; short runs in this direction are not measured")
    note = "copies of several sizes, alone and queued; latency of one more copy in a queue"
    return _link(evidence, "link", line, samples=samples, run_length=run_length or long_run, note=note)


def _copies(evidence: Evidence, name: str) -> list[Sample]:
    """Samples of copies: a CPU has only those beyond its caches, which would pass for a link otherwise."""
    return [sample for sample in evidence.samples(name) if "copies" in sample.at]


@dataclass(frozen=True, kw_only=True)
class Line:
    """seconds = latency x calls + bytes / rate."""

    latency_s: float
    bytes_per_s: float
    spread: float


def copies_line(samples: Sequence[Sample]) -> tuple[float, Line]:
    """(seconds once per queue, latency and rate of its copies)."""
    copies, moved_bytes = [float(sample.at["copies"]) for sample in samples], [each.moved_bytes for each in samples]
    columns = [[1.0] * len(samples), copies, moved_bytes]
    found = solve(columns, [each.median_s for each in samples], least=[0.0, LEAST_LATENCY_S, 1e-15])
    start, latency, per_byte = found.coefficients
    return start, Line(latency_s=latency, bytes_per_s=1 / per_byte, spread=found.spread)


def _link(
    evidence: Evidence, kind: str, line: Line, *, samples: Sequence[Sample], run_length: dict[str, Any], note: str
) -> dict[str, Any]:
    provenance = evidence.provenance(samples, line.spread, note)
    return {
        "rate": {"value": line.bytes_per_s, "unit": "B/s", **provenance},
        "latency": {"value": line.latency_s, "unit": "s", **provenance},
        "run_length": run_length,
        "datasheet": peak(kind, line.bytes_per_s, "B/s", evidence.machine, date=evidence.date),
    }


def _run_lengths(evidence: Evidence) -> dict[str, Any]:
    """Share of the link's rate by run length, in the region and page size where it is best: kernels carry the rest."""
    rate = copies_line(_copies(evidence, "host_to_device_copy"))[1].bytes_per_s
    return _best_shares(evidence, evidence.samples("host_to_device_gather"), rate, "random runs, best region and pages")


def _best_shares(evidence: Evidence, samples: Sequence[Sample], rate: float, note: str) -> dict[str, Any]:
    at = sorted({float(sample.at["run_bytes"]) for sample in samples})
    best = {run: _quickest([s for s in samples if float(s.at["run_bytes"]) == run], "link") for run in at}
    shares = [min(1.0, _per_second(best[run], "link") / rate) for run in at]
    return {"over": "run_bytes", "at": at, "efficiency": shares, **evidence.provenance(list(best.values()), 0.0, note)}


def _host(evidence: Evidence) -> dict[str, Any]:
    machine = evidence.machine
    used = max(1, machine.host_bytes - machine.host_free_bytes)
    together = [sample for sample in evidence.samples("disk_random_read") if sample.at["threads"] != 1]
    return {
        "memory": _stated(machine.host_bytes, evidence.date, "installed, or the limit of the control group"),
        "reserved": _stated(used, evidence.date, "in use before the first probe"),
        "dram": _random_link(evidence, "dram", [s for s in evidence.samples("host_read") if "alone" not in s.at]),
        "disk": _random_link(evidence, "disk", [*evidence.samples("disk_read"), *together]),
    }


def _random_link(evidence: Evidence, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Rate of the quickest pattern, its share by run length, and the latency of one read alone."""
    best = _quickest(samples, "link")
    rate = _per_second(best, "link")
    probe, counted = ("host_read", "alone") if kind == "dram" else ("disk_random_read", "reads")
    alone = [s for s in evidence.samples(probe) if s.at.get("alone") == 1 or s.at.get("threads") == 1]
    latency = min(s.median_s / float(s.at[counted]) for s in alone) if alone else 1e-7
    line = Line(latency_s=max(latency, LEAST_LATENCY_S), bytes_per_s=rate, spread=0.0)
    shares = _best_shares(evidence, samples, rate, "random runs; the longest is one sequential read")
    return _link(evidence, kind, line, samples=[best], run_length=shares, note="end to end; latency of a single read")


def _record(evidence: Evidence, *, name: str, command: str, fitted: dict[str, Any]) -> dict[str, Any]:
    """Everything that the profile's schema does not hold."""
    copies = _copies(evidence, "host_to_device_copy")
    return {
        "schema": RECORD_SCHEMA,
        "name": name,
        "date": evidence.date,
        "command": command,
        "machine": msgspec.to_builtins(evidence.machine) | {"device_id": ""},  # which card it was is nobody's business
        "queue_start_s": copies_line(copies)[0],
        "fitted": fitted,
        "probes": {probe: _summary(record) for probe, record in evidence.records.items()},
    }


def _summary(record: ProbeRecord) -> dict[str, Any]:
    """Samples as measured, and what they amount to; rounds only where there are some."""
    samples = []
    for sample in record.samples:
        plain = msgspec.to_builtins(sample) | {"median_s": sample.median_s, "spread": sample.spread, "n": sample.n}
        samples.append({key: value for key, value in plain.items() if key != "rounds" or sample.rounds})
    return {"skipped": record.skipped, "left_out": record.left_out, "took_s": record.took_s, "samples": samples}


# Peaks that bound what was measured: data sheets of known devices, PCIe by generation, or the measurement itself

HEADROOM = 1.05
"""Where no data sheet is known, the peak is the measured rate and this much: a bound to compare with, not a fact."""
SHEET_DATE = "2026-11-29"


class Sheet(NamedTuple):
    """Published peaks of one device."""

    vram: float
    """Bytes a second."""
    tensor: float
    """Dense fp16 and bf16 operations a second."""
    link: float
    """Bytes a second."""
    note: str


SHEETS = {
    "NVIDIA H200": Sheet(4.8e12, 989e12, 63.0e9, "NVIDIA H200 data sheet: HBM3e, dense fp16 and bf16, PCIe 5.0 x16"),
    "NVIDIA GeForce RTX 3090": Sheet(
        936.2e9, 142.3e12, 31.5e9, "GA102 whitepaper: GDDR6X, dense fp16 with fp16 accumulation, PCIe 4.0 x16"
    ),
}

INTEGER_LANES = 64
"""32-bit integer and logic operations that a multiprocessor of compute capability 7.0 to 9.0 begins each clock."""


def peak(kind: str, measured: float, unit: str, machine: Machine, *, date: str) -> dict[str, Any]:
    """The peak of `kind` (vram, tensor, instructions, link, dram, disk) as a rate; never below what was measured."""
    known = _known(kind, machine)
    rate = {"unit": unit, "spread": 0.0, "n": 1}
    if known is not None and known[0] >= measured:
        value, note = known
        return {"value": value, **rate, "source": "datasheet", "date": SHEET_DATE, "note": note}
    why = f"measured above the {known[0]:g} of its data sheet" if known else "no data sheet is known here"
    note = f"{why}: the measured rate x {HEADROOM}, a bound and not a peak"
    return {"value": measured * HEADROOM, **rate, "source": "measured", "date": date, "note": note}


def _known(kind: str, machine: Machine) -> tuple[float, str] | None:
    sheet = SHEETS.get(machine.name)
    if sheet is not None and kind in ("vram", "tensor", "link"):
        return getattr(sheet, kind), sheet.note
    clock = machine.smi.get("clocks.max.sm", "")
    if kind == "instructions" and clock.isdigit():
        note = f"{machine.sm_count} multiprocessors x {INTEGER_LANES} lanes x {clock} MHz"
        return machine.sm_count * INTEGER_LANES * int(clock) * 1e6, note
    if kind == "link" and (link := link_name(machine)):
        return link_bytes_per_s(link), link
    return None

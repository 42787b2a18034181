"""What a person should know about a calibration: a machine that was busy, limited or changed while it was measured."""

import os
from collections.abc import Mapping

from calibrate.machine.description import Machine
from calibrate.probes.probe import ProbeRecord, Sample
from twin.units import GIB, format_bytes

BUSY_PERCENT = 10
FREE_SHARE = 0.93
LITTLE_HOST_BYTES = 16 * GIB
DRIFT = 0.03
DRIFT_CPU = 0.15
NOISE = 0.10
AGAIN = "@end"
"""Suffix of a probe that is repeated at the end."""


def before(machine: Machine, *, load: float | None = None) -> list[str]:
    """What can be seen before the first probe. `load` is the load average of the last minute."""
    found = _busy(machine, os.getloadavg()[0] if load is None else load)
    free = format_bytes(machine.host_free_bytes)
    if machine.host_free_bytes < min(LITTLE_HOST_BYTES, machine.host_bytes // 2):
        found.append(f"only {free} of host memory are free: long contexts on the host are not measured")
    if machine.is_cuda and machine.huge_pages not in ("always", "madvise"):
        state = machine.huge_pages or "not there"
        found.append(f"transparent huge pages are {state}: host gathers run at the rate of 4 KiB pages")
    if machine.is_cuda and 0 <= machine.memlock_bytes < machine.host_free_bytes // 2:
        found.append(
            f"the locked-memory limit is {format_bytes(machine.memlock_bytes)} (ulimit -l): "
            "some drivers refuse to register more host memory than that"
        )
    if machine.governor in ("powersave", "conservative", "ondemand", "schedutil"):
        found.append(f"the CPU frequency governor is {machine.governor}: host rates may be those of a low clock")
    return found


def _busy(machine: Machine, load: float) -> list[str]:
    found = []
    if load > 0.5 * machine.cpu_count:
        found.append(
            f"the machine is busy: load average {load:.1f} on {machine.cpu_count} cores before the first probe"
        )
    if not machine.is_cuda:
        return found
    utilisation = machine.smi.get("utilization.gpu", "")
    if utilisation.isdigit() and int(utilisation) > BUSY_PERCENT:
        found.append(f"the GPU was {utilisation} % busy before the first probe: another process uses it")
    if machine.device_free_bytes < FREE_SHARE * machine.device_bytes:
        free, total = format_bytes(machine.device_free_bytes), format_bytes(machine.device_bytes)
        found.append(f"only {free} of {total} of GPU memory are free: another process holds the rest")
    return found


def after(machine: Machine, records: Mapping[str, ProbeRecord]) -> list[str]:
    """What the measurements themselves show."""
    found = _link(records) + _drift(machine, records)
    noisy = [name for name, record in records.items() if record.samples and _noise(record) > NOISE]
    if noisy:
        found.append(f"repeats differ by more than {NOISE:.0%} in {', '.join(noisy)}: was the machine idle?")
    found += [
        f"{name} was late: {record.left_out} of its points were left out"
        for name, record in records.items()
        if record.left_out
    ]
    return found


def one_round_only(records: Mapping[str, ProbeRecord], *, wanted: int) -> list[str]:
    """Where there was no time for the rounds that this device takes: the machine was too busy."""
    ran = [record for name, record in records.items() if record.samples and not name.endswith(AGAIN)]
    once = sum(not any(len(sample.rounds) > 1 for sample in record.samples) for record in ran)
    if wanted == 1 or not once:
        return []
    told = "of other moments they say nothing" if once == len(ran) else "their spread is that of the others"
    return [f"there was time to measure {once} of {len(ran)} probes in one round only, not in {wanted}: {told}"]


def _noise(record: ProbeRecord) -> float:
    spreads = sorted(sample.spread for sample in record.samples)
    return spreads[len(spreads) // 2]


def _link(records: Mapping[str, ProbeRecord]) -> list[str]:
    record = records.get("host_to_device_copy", ProbeRecord())
    found = []
    for sample in record.samples:
        for what, said in (("gen", "generation"), ("width", "width")):
            now, most = (_number(sample, f"pcie.link.{what}.{which}") for which in ("current", "max"))
            if now is not None and most is not None and now < most:
                found.append(
                    f"the PCIe link runs at {said} {now} of {most} while it is loaded: riser, slot or firmware?"
                )
    return found


def _number(sample: Sample, key: str) -> int | None:
    value = str(sample.at.get(key, ""))
    return int(value) if value.isdigit() else None


def _drift(machine: Machine, records: Mapping[str, ProbeRecord]) -> list[str]:
    found = []
    for name, record in records.items():
        first = records.get(name.removesuffix(AGAIN), ProbeRecord())
        if not name.endswith(AGAIN) or not record.samples or not first.samples:
            continue
        change = record.samples[0].median_s / first.samples[0].median_s - 1
        if abs(change) > (DRIFT if machine.is_cuda else DRIFT_CPU):
            word = "slower" if change > 0 else "quicker"
            found.append(
                f"{name.removesuffix(AGAIN)} is {abs(change):.0%} {word} at the end than at the start: "
                "heat, clocks or other load changed meanwhile"
            )
    return found

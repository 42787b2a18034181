"""What a person should know about a calibration: a machine that was busy, limited or changed while it was measured."""

import os
from collections.abc import Mapping

from calibrate.machine.description import Machine
from calibrate.probes import ProbeRecord
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
    load = os.getloadavg()[0] if load is None else load
    used = machine.smi.get("utilization.gpu", "")
    host_free, locked = format_bytes(machine.host_free_bytes), format_bytes(max(0, machine.memlock_bytes))
    free, total = format_bytes(machine.device_free_bytes), format_bytes(machine.device_bytes)
    anywhere = (
        (load > 0.5 * machine.cpu_count,
         f"the machine is busy: load average {load:.1f} on {machine.cpu_count} cores before the first probe"),
        (machine.host_free_bytes < min(LITTLE_HOST_BYTES, machine.host_bytes // 2),
         f"only {host_free} of host memory are free: long contexts on the host are not measured"),
        (machine.governor in ("powersave", "conservative", "ondemand", "schedutil"),
         f"the CPU frequency governor is {machine.governor}: host rates may be those of a low clock"),
    )  # fmt: skip
    of_a_gpu = (
        (used.isdigit() and int(used) > BUSY_PERCENT,
         f"the GPU was {used} % busy before the first probe: another process uses it"),
        (machine.device_free_bytes < FREE_SHARE * machine.device_bytes,
         f"only {free} of {total} of GPU memory are free: another process holds the rest"),
        (machine.huge_pages not in ("always", "madvise"),
         f"transparent huge pages are {machine.huge_pages or 'not there'}: "
         "host gathers run at the rate of 4 KiB pages"),
        (0 <= machine.memlock_bytes < machine.host_free_bytes // 2,
         f"the locked-memory limit is {locked} (ulimit -l): "
         "some drivers refuse to register more host memory than that"),
    )  # fmt: skip
    return [told for holds, told in (*anywhere, *(of_a_gpu if machine.is_cuda else ())) if holds]


def after(machine: Machine, records: Mapping[str, ProbeRecord]) -> list[str]:
    """What the measurements themselves show."""
    found = _link(records) + _drift(machine, records)
    spreads = {name: sorted(sample.spread for sample in record.samples) for name, record in records.items()}
    noisy = [name for name, own in spreads.items() if own and own[len(own) // 2] > NOISE]
    if noisy:
        found.append(f"repeats differ by more than {NOISE:.0%} in {', '.join(noisy)}: was the machine idle?")
    late = {name: record.left_out for name, record in records.items() if record.left_out}
    return found + [f"{name} was late: {count} of its points were left out" for name, count in late.items()]


def one_round_only(records: Mapping[str, ProbeRecord], *, wanted: int) -> list[str]:
    """Where there was no time for the rounds that this device takes: the machine was too busy."""
    ran = [record for name, record in records.items() if record.samples and not name.endswith(AGAIN)]
    once = sum(not any(len(sample.rounds) > 1 for sample in record.samples) for record in ran)
    if wanted == 1 or not once:
        return []
    told = "of other moments they say nothing" if once == len(ran) else "their spread is that of the others"
    return [f"there was time to measure {once} of {len(ran)} probes in one round only, not in {wanted}: {told}"]


def _link(records: Mapping[str, ProbeRecord]) -> list[str]:
    found = []
    for sample in records.get("host_to_device_copy", ProbeRecord()).samples:
        for what, said in (("gen", "generation"), ("width", "width")):
            now, most = (str(sample.at.get(f"pcie.link.{what}.{which}", "")) for which in ("current", "max"))
            if now.isdigit() and most.isdigit() and int(now) < int(most):
                told = f"the PCIe link runs at {said} {now} of {most} while it is loaded"
                found.append(f"{told}: riser, slot or firmware?")
    return found


def _drift(machine: Machine, records: Mapping[str, ProbeRecord]) -> list[str]:
    found = []
    for name, record in records.items():
        probe = name.removesuffix(AGAIN)
        first = records.get(probe, ProbeRecord())
        if probe == name or not record.samples or not first.samples:
            continue
        change = record.samples[0].median_s / first.samples[0].median_s - 1
        if abs(change) > (DRIFT if machine.is_cuda else DRIFT_CPU):
            told = f"{probe} is {abs(change):.0%} {'slower' if change > 0 else 'quicker'} at the end than at the start"
            found.append(f"{told}: heat, clocks or other load changed meanwhile")
    return found

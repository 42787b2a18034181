"""One calibration from start to finish: probes in order, each kept as soon as it is done, then a profile."""

import errno
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calibrate import cautions
from calibrate.build import CannotCalibrate, build
from calibrate.journal import Journal, open_journal
from calibrate.machine.description import Machine, check_device, describe, first_line, open_checked
from calibrate.operations.operation import KV_DTYPE
from calibrate.operations.table import OPERATIONS
from calibrate.operations.timing import release, settle
from calibrate.probes import CannotRun, Context, Probe, ProbeRecord, WrongData, all_probes
from calibrate.rounds import in_order, joined_rounds, round_name
from twin.cli.outputs import check_outputs, write_atomic
from twin.errors import CannotWrite
from twin.units import GIB, format_bytes

Progress = Callable[[str, float, float], None]
"""(probe that begins or "", seconds of work done, seconds of work in all), by the probes' own estimates."""
QUICK_S, FULL_S = 160.0, 570.0
"""Time after which probes are cut short, so that the whole stays below 3 and 10 minutes."""
LATER_SHARE = 0.75
"""Of that time, after which no probe of a later round begins: the first is what a profile cannot do without."""
END = -1
"""The number of the round that looks once more at the first probe."""
LEAST_FREE_BYTES = 2 * GIB
KEPT = "the finished probes are kept: the same command continues"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished calibration."""

    profile_path: Path
    record_path: Path
    profile: dict[str, Any]
    record: dict[str, Any]
    cautions: tuple[str, ...]
    resumed: tuple[str, ...]
    """Probes taken over from an interrupted run."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Probes that this machine cannot run, and why."""
    seconds: float


def run_calibration(
    *, device: str, quick: bool, output: Path, name: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Measure `device` ("cpu", "cuda", "cuda:0") and write its profile to `output` and what it rests on beside it.

    Finished probes outlive an interruption in `<output>.partial.json`; the same call continues there.
    Raises BadValue, CannotCalibrate (exit 2) and CannotWrite (exit 5) in one line; KeyboardInterrupt passes.
    """
    check_device(device)
    check_outputs(output)
    backend = open_checked(device, CannotCalibrate)
    machine = describe("cpu" if backend.device.type == "cpu" else str(backend.device), dtype=KV_DTYPE)
    check_room(machine)
    settle(OPERATIONS)
    run = Run(
        probes=all_probes(), machine=machine, backend=backend, quick=quick, rounds=backend.rounds, output=output,
        name=name or output.stem,
    )  # fmt: skip
    return run.finish(progress or (lambda _probe, _done_s, _total_s: None))


def check_room(machine: Machine) -> None:
    """Raise CannotCalibrate where device or host have too little free memory for any useful measurement."""
    if machine.is_cuda and machine.device_free_bytes < LEAST_FREE_BYTES:
        free, total = format_bytes(machine.device_free_bytes), format_bytes(machine.device_bytes)
        raise CannotCalibrate(
            f"{machine.name} has {free} of {total} free, calibration needs {format_bytes(LEAST_FREE_BYTES)}",
            hint="another process holds its memory: see nvidia-smi",
        )
    if machine.host_free_bytes < LEAST_FREE_BYTES:
        free = format_bytes(machine.host_free_bytes)
        raise CannotCalibrate(f"{free} of host memory are free, calibration needs {format_bytes(LEAST_FREE_BYTES)}")


@dataclass(kw_only=True)
class Run:
    """The probes of one machine and where their results go."""

    probes: Sequence[Probe]
    machine: Machine
    backend: Any
    quick: bool
    rounds: int = 1
    """How many times each probe runs, apart from each other; rounds after the first only while there is time."""
    output: Path
    name: str
    load: float | None = None
    """Load average before the first probe; None to read it."""

    def finish(self, progress: Progress) -> Outcome:
        """Run what is not done yet, build, write, and only then remove the journal."""
        begin = time.monotonic()
        warnings = cautions.before(self.machine, load=self.load)
        journal = self._journal()
        resumed = tuple(journal.probes)
        if journal.ignored:
            warnings.append(journal.ignored)
        self._measure(journal, progress, begin)
        records = joined_rounds(journal.probes)
        warnings += cautions.after(self.machine, records) + cautions.one_round_only(records, wanted=self.rounds)
        profile, record = self._built(journal, records)
        record |= {"mode": "quick" if self.quick else "full", "cautions": warnings, "resumed": list(resumed)}
        record_path = self.output.with_name(f"{self.output.stem}.record.json")
        write_atomic(record_path, json.dumps(record, indent=1, allow_nan=False) + "\n")
        write_atomic(self.output, json.dumps(profile, indent=1, allow_nan=False) + "\n")
        journal.path.unlink(missing_ok=True)
        return Outcome(
            profile_path=self.output, record_path=record_path, profile=profile, record=record,
            cautions=tuple(warnings), resumed=resumed, seconds=time.monotonic() - begin,
            skipped={probe: made.skipped for probe, made in records.items() if made.skipped},
        )  # fmt: skip

    def _built(self, journal: Journal, records: dict[str, ProbeRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Profile and record. Measurements that make no profile are set aside, so that the next call takes new ones."""
        quick = " --quick" if self.quick else ""
        command = f"twin calibrate --device {journal.machine.device}{quick} -o {self.output.name}"
        try:
            return build(machine=journal.machine, records=records, name=self.name, date=journal.date, command=command)
        except CannotCalibrate:
            journal.set_aside()
            raise

    def _journal(self) -> Journal:
        """Opened and written once, so that an output that cannot be written is known before anything is measured."""
        today = datetime.now(UTC).date().isoformat()
        try:
            journal = open_journal(self.output, self.machine, quick=self.quick, date=today)
        except OSError as wrong:
            raise CannotWrite(f"cannot write beside {self.output}: {wrong.strerror}") from None
        journal.save()
        return journal

    def _measure(self, journal: Journal, progress: Progress, begin: float) -> None:
        waiting = self._waiting(journal)
        left = {number: sum(map(self._estimate, probes)) for number, probes in waiting.items()}
        total = sum(left.values()) + sum(record.took_s for record in journal.probes.values())
        for number, probes in waiting.items():
            for probe in probes:
                progress(probe.name, total - sum(left.values()), total)
                limit_s = (QUICK_S if self.quick else FULL_S) * (LATER_SHARE if number > 0 else 1)
                time_left = limit_s - (time.monotonic() - begin)
                if time_left > 0 or number in (0, END):
                    allowed = self._estimate(probe) * min(1.5, max(0.25, time_left / left[number]))
                    journal.add(probe.name, self._run(probe, allowed))
                left[number] -= self._estimate(probe)
        progress("", total, total)

    def _waiting(self, journal: Journal) -> dict[int, list[Probe]]:
        """What is not done yet, by round; what this machine cannot run is noted."""
        rounds = {
            number: [replace(probe, name=round_name(probe.name, number)) for probe in in_order(self.probes, number)]
            for number in range(self.rounds)
        }
        first = self.probes[0]
        rounds[END] = [replace(first, name=first.name + cautions.AGAIN)]
        for probe in (*rounds[0], *rounds[END]):
            reason = probe.supported(self.machine)
            if reason:
                journal.probes.setdefault(probe.name, ProbeRecord(skipped=reason))

        def waits(probe: Probe) -> bool:
            return not probe.supported(self.machine) and probe.name not in journal.probes

        return {number: list(filter(waits, probes)) for number, probes in rounds.items()}

    def _estimate(self, probe: Probe) -> float:
        return probe.estimate_s(quick=self.quick)

    def _run(self, probe: Probe, allowed_s: float) -> ProbeRecord:
        context = Context(
            machine=self.machine, backend=self.backend, folder=self.output.parent, quick=self.quick,
            rounds=self.rounds, estimate_s=allowed_s,
        )  # fmt: skip
        begin = time.monotonic()
        try:
            samples = probe.run(context)
        except CannotRun as missing:
            return ProbeRecord(skipped=first_line(missing), took_s=time.monotonic() - begin)
        except (WrongData, MemoryError, OSError, RuntimeError) as wrong:
            raise self._refusal(probe.name, wrong) from wrong
        finally:
            release()  # the next probe sizes itself by what was free before the first
        return ProbeRecord(samples=tuple(samples), left_out=context.left_out, took_s=time.monotonic() - begin)

    def _refusal(self, name: str, wrong: Exception) -> Exception:
        """What to tell, in one line, of a probe that fails."""
        if isinstance(wrong, WrongData):
            return CannotCalibrate(str(wrong), hint="the finished probes are kept")
        if isinstance(wrong, MemoryError):
            return CannotCalibrate(f"{name}: host memory ran out", hint="close other programs")
        if isinstance(wrong, OSError):
            if wrong.errno in FULL_DISK:
                told = f"{name}: the disk of {self.output.parent} is full"
                return CannotWrite(told, hint="the finished probes are kept: free some room")
            return CannotCalibrate(f"{name}: {wrong.strerror or wrong}")
        memory = type(wrong).__name__ == "OutOfMemoryError"
        advice = "another process may hold GPU memory: see nvidia-smi" if memory else KEPT
        return CannotCalibrate(f"{name}: {first_line(wrong)}", hint=advice)

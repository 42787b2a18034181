"""A calibration from start to finish with probes that need no device: what survives a kill, and what is refused."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate import cautions
from calibrate.build import CannotCalibrate
from calibrate.journal import journal_path
from calibrate.probes import CannotRun, Context, Probe, ProbeRecord, Sample, WrongData
from calibrate.session import Outcome, Run, check_room, run_calibration
from hwprofiles import load_profile
from tests.calibrate import probe_worlds as worlds
from twin.errors import BadValue, CannotWrite

ROOT = Path(__file__).parents[2]
NAMES = [probe.name for probe in worlds.fake_probes()]
CTRL_C = {"disk_read": KeyboardInterrupt()}


@pytest.fixture(autouse=True)
def _nothing_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """These probes hold no memory, and the tests' own objects take long to look through."""
    monkeypatch.setattr("calibrate.session.release", lambda: None)


def calibrated(
    folder: Path,
    *,
    ran: list[str] | None = None,
    failing: dict[str, BaseException] | None = None,
    probes: tuple[Probe, ...] | None = None,
    progress: Callable[[str, float, float], None] = lambda *_told: None,
    **changes: Any,
) -> Outcome:
    """A whole calibration by probes that note in `ran` that they ran, some of them raising instead."""

    def wrapped(probe: Probe) -> Probe:
        def run(context: Context) -> list[Sample]:
            if ran is not None:
                ran.append(probe.name)
            if failing is not None and probe.name in failing:
                raise failing[probe.name]
            return probe.run(context)

        return replace(probe, run=run, quick_s=1, full_s=1)

    fields: dict[str, Any] = {
        "machine": worlds.machine(), "backend": None, "quick": True, "output": folder / "toy.json", "name": "toy",
        "load": 0.0,
    }  # fmt: skip
    return Run(probes=tuple(map(wrapped, probes or worlds.fake_probes())), **fields | changes).finish(progress)


def interrupted(folder: Path, **changes: Any) -> list[str]:
    """What ran until Ctrl-C in the middle."""
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        calibrated(folder, **{"ran": ran, "failing": CTRL_C, **changes})
    return ran


def test_a_finished_calibration_leaves_a_profile_a_record_and_no_journal(tmp_path: Path) -> None:
    told: list[tuple[str, float, float]] = []
    outcome = calibrated(tmp_path, progress=lambda *step: told.append(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json", "toy.record.json"]
    assert load_profile(str(outcome.profile_path)).name == "toy"
    record = json.loads(outcome.record_path.read_text())
    assert (record["mode"], outcome.cautions) == ("quick", ())
    assert "vram_read@end" in record["probes"]
    assert [name for name, _, _ in told] == [*NAMES, "vram_read@end", ""]
    assert all(done <= total for _, done, total in told)
    assert told[-1][1] == told[-1][2]


def test_ctrl_c_keeps_what_is_done_and_the_same_call_continues(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text("old")
    before, ran = interrupted(tmp_path), list[str]()
    assert (tmp_path / "toy.json").read_text() == "old"
    outcome = calibrated(tmp_path, ran=ran)
    assert ran[0] == "disk_read"
    assert set(outcome.resumed) == set(before) - {"disk_read"}
    assert not journal_path(outcome.profile_path).exists()


def test_rounds_run_everything_again_and_come_together_in_the_record(tmp_path: Path) -> None:
    ran: list[str] = []
    outcome = calibrated(tmp_path, ran=ran, rounds=2)
    assert ran[: len(NAMES)] == NAMES
    assert sorted(ran[len(NAMES) : -1]) == sorted(NAMES)
    assert ran[-1] == NAMES[0]  # the look back at the end
    assert set(outcome.record["probes"]) == {*NAMES, f"{NAMES[0]}@end"}
    assert all(sample["rounds"] == (5, 5) for sample in outcome.record["probes"]["decode_select"]["samples"])


def test_a_later_round_is_cut_short_where_time_is_out_and_the_first_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.session.QUICK_S", 0.0)
    ran: list[str] = []
    outcome = calibrated(tmp_path, ran=ran, rounds=3)
    assert ran == [*NAMES, NAMES[0]]
    assert "rounds" not in outcome.record["probes"]["decode_select"]["samples"][0]
    said = f"{len(NAMES)} of {len(NAMES)} probes in one round only, not in 3"
    assert any(said in caution for caution in outcome.cautions)


def test_a_later_round_that_was_interrupted_is_continued(tmp_path: Path) -> None:
    disk_read = worlds.records()["disk_read"].samples
    calls: list[int] = []

    def second_time(_context: Context) -> list[Sample]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return list(disk_read)

    probes = (replace(p, run=second_time) if p.name == "disk_read" else p for p in worlds.fake_probes())
    before = interrupted(tmp_path, probes=tuple(probes), failing={}, rounds=2)
    ran: list[str] = []
    outcome = calibrated(tmp_path, ran=ran, rounds=2)
    assert ran[0] == "disk_read"
    assert {"decode_select", "vram_read@2"} <= set(outcome.resumed)
    assert len(before) - 1 + len(ran) == 2 * len(NAMES) + 1


KILLED = """
import sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.calibrate import probe_worlds as worlds
from tests.calibrate.test_session import calibrated

def stop(context):
    Path({flag!r}).touch()
    time.sleep(60)

probes = tuple(replace(p, run=stop) if p.name == "disk_read" else p for p in worlds.fake_probes())
calibrated(Path({folder!r}), probes=probes)
"""


def test_kill_9_in_the_middle_loses_no_more_than_the_probe_that_ran(tmp_path: Path) -> None:
    flag, ran = tmp_path / "flag", list[str]()
    script = KILLED.format(root=str(ROOT), flag=str(flag), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        limit = time.monotonic() + 60
        while not flag.exists() and child.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    flag.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json.partial.json"]
    outcome = calibrated(tmp_path, ran=ran)
    assert ran[0] == "disk_read"
    assert "vram_read" in outcome.resumed
    assert outcome.profile_path.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": worlds.machine(driver="9.9")}, "driver is 1.2, here it is 9.9"),
        ({"machine": worlds.machine(name="Other 1")}, "device is Toy 9000, here it is Other 1"),
        ({"machine": worlds.machine(versions={"torch": "3.0"})}, "versions is torch 2.11, here it is torch 3.0"),
        ({"machine": worlds.machine(code="def")}, "code is abc, here it is def"),
        ({"quick": False}, "mode is quick, here it is full"),
    ],
)
def test_a_journal_of_another_machine_or_mode_is_moved_aside_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    interrupted(tmp_path)
    ran: list[str] = []
    outcome = calibrated(tmp_path, ran=ran, **changes)
    assert (ran[0], outcome.resumed) == ("vram_read", ())
    assert any(said in caution for caution in outcome.cautions)
    assert (tmp_path / "toy.json.partial.json.old").exists()


def test_a_disk_that_fills_while_the_journal_is_written_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, calls = os.fsync, list[int]()

    def fails_later(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved(handle)

    monkeypatch.setattr(os, "fsync", fails_later)
    with pytest.raises(CannotWrite, match="No space left"):
        calibrated(tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json.partial.json"]
    assert json.loads(journal_path(tmp_path / "toy.json").read_text())["probes"]


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (WrongData("gather_host: the result is wrong after timing"), "wrong after timing", 2),
        (MemoryError(), "host memory ran out", 2),
        (RuntimeError("registering 9 GiB failed\nmore"), "select: registering 9 GiB failed", 2),
        (OSError(errno.EIO, "Input/output error"), "select: Input/output error", 2),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk of ", 5),
    ],
)
def test_a_probe_that_fails_is_one_line_and_keeps_what_is_done(
    tmp_path: Path, error: Exception, said: str, code: int
) -> None:
    with pytest.raises((CannotCalibrate, CannotWrite)) as refused:
        calibrated(tmp_path, failing={"decode_select": error})
    assert said in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.exit_code == code
    assert "vram_read" in json.loads(journal_path(tmp_path / "toy.json").read_text())["probes"]


def test_a_broken_journal_and_measurements_that_make_no_profile_are_set_aside(tmp_path: Path) -> None:
    path = journal_path(tmp_path / "toy.json")
    path.write_text('{"schema": ')
    assert any("cannot be read" in caution for caution in calibrated(tmp_path).cautions)
    probes = tuple(probe for probe in worlds.fake_probes() if probe.name != "disk_read")
    with pytest.raises(CannotCalibrate, match="disk_read"):
        calibrated(tmp_path, probes=probes)
    assert not path.exists()


def test_what_a_machine_cannot_run_is_skipped_with_a_reason_that_is_kept(tmp_path: Path) -> None:
    """Known before, or found out by trying."""
    launch = Probe(name="launch", run=lambda _context: pytest.fail("ran"), supported=lambda _machine: "no GPU here")
    probes = (*worlds.fake_probes(), launch, worlds.fake_probe("attend", []))
    missing: dict[str, BaseException] = {"attend": CannotRun("no flash attention here: sm75\nmore")}
    interrupted(tmp_path, probes=probes, failing=missing | {"vram_copy": KeyboardInterrupt()})
    outcome = calibrated(tmp_path, probes=probes, failing=missing)
    assert outcome.skipped == {"launch": "no GPU here", "attend": "no flash attention here: sm75"}
    assert outcome.record["probes"]["attend"]["skipped"] == "no flash attention here: sm75"


def test_a_wrong_output_or_device_and_too_little_memory_are_told_before_measuring(tmp_path: Path) -> None:
    for device, place, error, said in (
        ("cpu", ".", CannotWrite, "it is a folder"),
        ("cpu", "none/toy.json", CannotWrite, "No such file or directory"),
        ("gpu0", "toy.json", BadValue, "unknown device 'gpu0'"),
    ):
        with pytest.raises(error, match=said):
            run_calibration(device=device, quick=True, output=tmp_path / place)
    for memory, said in (("device_free_bytes", "another process"), ("host_free_bytes", "host memory")):
        with pytest.raises(CannotCalibrate) as refused:
            check_room(worlds.machine(**{memory: 2**30}))
        assert said in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.parametrize(
    ("changes", "load", "said"),
    [
        ({}, 6.0, "load average 6.0 on 8 cores"),
        ({"smi": {"utilization.gpu": "80"}}, 0.0, "80 % busy"),
        ({"device_free_bytes": 40 * 2**30}, 0.0, "of GPU memory are free"),
        ({"huge_pages": "never"}, 0.0, "huge pages are never"),
        ({"memlock_bytes": 8 * 2**20}, 0.0, "locked-memory limit is 8.0 MiB"),
        ({"host_free_bytes": 10 * 2**30, "host_bytes": 32 * 2**30}, 0.0, "10.00 GiB of host memory"),
        ({"governor": "powersave"}, 0.0, "governor is powersave"),
        ({}, 0.1, ""),
        ({"device": "cpu", "huge_pages": "never"}, 0.1, ""),
    ],
)
def test_what_a_person_should_know_is_told(changes: dict[str, Any], load: float, said: str) -> None:
    found = cautions.before(worlds.machine(**changes), load=load)
    assert len(found) == bool(said)
    assert all(said in told for told in found)


def test_a_narrow_link_drift_noise_and_missing_points_are_told() -> None:
    state = {"pcie.link.gen.current": "4", "pcie.link.gen.max": "5", "pcie.link.width.current": "8"}
    loaded = worlds.sample(1.0, state="loaded", **state, **{"pcie.link.width.max": "16"})
    noisy = Sample(at={"bytes": 1}, seconds=(1.0, 1.5, 2.0, 2.5, 3.0))
    records = {
        "host_to_device_copy": ProbeRecord(samples=(loaded,)),
        "vram_read": ProbeRecord(samples=(worlds.sample(1.0, bytes=1),)),
        "vram_read@end": ProbeRecord(samples=(worlds.sample(1.1, bytes=1),)),
        "topk": ProbeRecord(samples=(noisy,)),
        "select": ProbeRecord(samples=(worlds.sample(1.0, bytes=1),), left_out=2),
    }
    found = "\n".join(cautions.after(worlds.machine(), records))
    for said in ("generation 4 of 5", "width 8 of 16", "10% slower", "more than 10% in topk", "select was late: 2"):
        assert said in found
    assert cautions.after(worlds.machine(), worlds.records()) == []

"""A calibration from start to finish with probes that need no device: what survives a kill, and what is refused."""

import errno
import json
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
from calibrate.probes import CannotRun, Context, Machine, Probe, ProbeRecord, Sample, WrongData
from calibrate.session import Run, check_room, run_calibration
from hwprofiles import load_profile
from tests.calibrate import probe_worlds as worlds
from twin.errors import BadValue, CannotWrite

ROOT = Path(__file__).parents[2]


def run_of(folder: Path, probes: tuple[Probe, ...], **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "machine": worlds.machine(), "backend": None, "quick": True, "output": folder / "toy.json", "name": "toy",
        "load": 0.0,
    }  # fmt: skip
    return Run(probes=probes, **fields | changes)


def counted(probes: tuple[Probe, ...], ran: list[str], *, failing: dict[str, BaseException]) -> tuple[Probe, ...]:
    """The probes, each noting that it ran, some of them raising instead."""

    def wrapped(probe: Probe) -> Callable[[Context], list[Sample]]:
        def run(context: Context) -> list[Sample]:
            ran.append(probe.name)
            if probe.name in failing:
                raise failing[probe.name]
            return probe.run(context)

        return run

    return tuple(Probe(name=probe.name, run=wrapped(probe), quick_s=1, full_s=1) for probe in probes)


def quiet(_name: str, _done_s: float, _total_s: float) -> None:
    return


def test_a_finished_calibration_leaves_a_profile_a_record_and_no_journal(tmp_path: Path) -> None:
    outcome = run_of(tmp_path, worlds.fake_probes()).finish(quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json", "toy.record.json"]
    assert load_profile(str(outcome.profile_path)).name == "toy"
    record = json.loads(outcome.record_path.read_text())
    assert record["mode"] == "quick"
    assert "vram_read@end" in record["probes"]
    assert outcome.cautions == ()


def test_progress_names_each_probe_and_ends_with_all_the_work_done(tmp_path: Path) -> None:
    told: list[tuple[str, float, float]] = []
    run_of(tmp_path, worlds.fake_probes()).finish(lambda *step: told.append(step))
    assert [name for name, _, _ in told] == [*worlds.records(), "vram_read@end", ""]
    assert all(done <= total for _, done, total in told)
    assert told[-1][1] == told[-1][2]


def test_ctrl_c_keeps_what_is_done_and_the_same_call_continues(tmp_path: Path) -> None:
    probes, ran = worlds.fake_probes(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, counted(probes, ran, failing={"disk_read": KeyboardInterrupt()})).finish(quiet)
    assert not (tmp_path / "toy.json").exists()
    before = [*ran]
    outcome = run_of(tmp_path, counted(probes, ran, failing={})).finish(quiet)
    assert ran[len(before)] == "disk_read"
    assert set(outcome.resumed) == set(before) - {"disk_read"}
    assert not journal_path(outcome.profile_path).exists()


def test_rounds_run_everything_again_and_come_together_in_the_record(tmp_path: Path) -> None:
    probes, ran = worlds.fake_probes(), list[str]()
    outcome = run_of(tmp_path, counted(probes, ran, failing={}), rounds=2).finish(quiet)
    names = [probe.name for probe in probes]
    assert ran[: len(names)] == names
    assert sorted(ran[len(names) : 2 * len(names)]) == sorted(names)
    assert ran[2 * len(names) :] == [names[0]]  # the look back at the end
    assert set(outcome.record["probes"]) == {*names, f"{names[0]}@end"}
    assert all(sample["rounds"] == (5, 5) for sample in outcome.record["probes"]["decode_select"]["samples"])


def test_a_later_round_is_cut_short_where_time_is_out_and_the_first_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.session.QUICK_S", 0.0)
    probes, ran = worlds.fake_probes(), list[str]()
    outcome = run_of(tmp_path, counted(probes, ran, failing={}), rounds=3).finish(quiet)
    assert ran == [*(probe.name for probe in probes), probes[0].name]
    assert "rounds" not in outcome.record["probes"]["decode_select"]["samples"][0]
    assert any(
        f"{len(probes)} of {len(probes)} probes in one round only, not in 3" in said for said in outcome.cautions
    )


def test_a_later_round_that_was_interrupted_is_continued(tmp_path: Path) -> None:
    probes, ran = worlds.fake_probes(), list[str]()
    failing: dict[str, BaseException] = {}
    first = counted(probes, ran, failing=failing)

    def second_time(_context: Context) -> list[Sample]:
        if ran.count("disk_read") == 1:
            raise KeyboardInterrupt
        ran.append("disk_read")
        return list(worlds.records()["disk_read"].samples)

    breaking = tuple(replace(probe, run=second_time) if probe.name == "disk_read" else probe for probe in first)
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, breaking, rounds=2).finish(quiet)
    before = len(ran)
    outcome = run_of(tmp_path, first, rounds=2).finish(quiet)
    assert ran[before] == "disk_read"
    assert {"decode_select", "vram_read@2"} <= set(outcome.resumed)
    assert len(ran) == 2 * len(probes) + 1


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from calibrate.session import Run
from calibrate.probes import Probe
from tests.calibrate import probe_worlds as worlds

def stop(context):
    Path({flag!r}).touch()
    import time
    time.sleep(60)

probes = [Probe(name=p.name, run=stop if p.name == "disk_read" else p.run, quick_s=1) for p in worlds.fake_probes()]
place = dict(output=Path({output!r}), name="toy", load=0.0)
run = Run(probes=probes, machine=worlds.machine(), backend=None, quick=True, **place)
run.finish(lambda *step: None)
"""


def test_kill_9_in_the_middle_loses_no_more_than_the_probe_that_ran(tmp_path: Path) -> None:
    flag, output = tmp_path / "flag", tmp_path / "toy.json"
    script = KILLED.format(root=str(ROOT), flag=str(flag), output=str(output))
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
    ran: list[str] = []
    outcome = run_of(tmp_path, counted(worlds.fake_probes(), ran, failing={})).finish(quiet)
    assert ran[0] == "disk_read"
    assert "vram_read" in outcome.resumed
    assert outcome.profile_path.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"driver": "9.9"}, "driver is 1.2, here it is 9.9"),
        ({"name": "Other 1"}, "device is Toy 9000, here it is Other 1"),
        ({"versions": {"torch": "3.0"}}, "versions is torch 2.11, here it is torch 3.0"),
        ({"code": "def"}, "code is abc, here it is def"),
    ],
)
def test_a_journal_of_another_machine_is_moved_aside_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    probes, ran = worlds.fake_probes(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, counted(probes, ran, failing={"disk_read": KeyboardInterrupt()})).finish(quiet)
    ran.clear()
    outcome = run_of(tmp_path, counted(probes, ran, failing={}), machine=worlds.machine(**changes)).finish(quiet)
    assert ran[0] == "vram_read"
    assert outcome.resumed == ()
    assert any(said in caution for caution in outcome.cautions)
    assert (tmp_path / "toy.json.partial.json.old").exists()


def test_a_quick_journal_is_not_continued_by_a_full_calibration(tmp_path: Path) -> None:
    probes = worlds.fake_probes()
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, counted(probes, [], failing={"disk_read": KeyboardInterrupt()})).finish(quiet)
    outcome = run_of(tmp_path, probes, quick=False).finish(quiet)
    assert any("mode is quick, here it is full" in caution for caution in outcome.cautions)


def test_a_broken_journal_is_moved_aside(tmp_path: Path) -> None:
    journal_path(tmp_path / "toy.json").write_text('{"schema": ')
    outcome = run_of(tmp_path, worlds.fake_probes()).finish(quiet)
    assert any("cannot be read" in caution for caution in outcome.cautions)


def test_a_full_disk_in_a_probe_keeps_what_is_done_and_exits_with_5(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CannotWrite, match="disk") as refused:
        run_of(tmp_path, counted(worlds.fake_probes(), [], failing={"disk_read": full})).finish(quiet)
    assert refused.value.exit_code == 5
    assert "vram_read" in json.loads(journal_path(tmp_path / "toy.json").read_text())["probes"]


def test_a_disk_that_fills_while_the_journal_is_written_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    saved = os.fsync
    calls = 0

    def fails_later(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved(handle)

    monkeypatch.setattr(os, "fsync", fails_later)
    with pytest.raises(CannotWrite, match="No space left"):
        run_of(tmp_path, worlds.fake_probes()).finish(quiet)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json.partial.json"]
    assert json.loads(journal_path(tmp_path / "toy.json").read_text())["probes"]


def test_an_old_profile_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, counted(worlds.fake_probes(), [], failing={"disk_read": KeyboardInterrupt()})).finish(quiet)
    assert (tmp_path / "toy.json").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WrongData("gather_host: the result is wrong after timing"), "wrong after timing"),
        (MemoryError(), "host memory ran out"),
        (RuntimeError("registering 9 GiB failed\nmore"), "select: registering 9 GiB failed"),
    ],
)
def test_a_probe_that_fails_is_one_line_with_exit_2(tmp_path: Path, error: Exception, said: str) -> None:
    with pytest.raises(CannotCalibrate) as refused:
        run_of(tmp_path, counted(worlds.fake_probes(), [], failing={"decode_select": error})).finish(quiet)
    assert said in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.exit_code == 2


def test_measurements_that_make_no_profile_are_set_aside(tmp_path: Path) -> None:
    probes = tuple(probe for probe in worlds.fake_probes() if probe.name != "disk_read")
    with pytest.raises(CannotCalibrate, match="disk_read"):
        run_of(tmp_path, probes).finish(quiet)
    assert not journal_path(tmp_path / "toy.json").exists()


def test_an_unsupported_probe_says_why_and_does_not_run(tmp_path: Path) -> None:
    extra = Probe(name="launch", run=lambda _context: pytest.fail("ran"), supported=lambda _machine: "no GPU here")
    outcome = run_of(tmp_path, (*worlds.fake_probes(), extra)).finish(quiet)
    assert outcome.skipped == {"launch": "no GPU here"}


def test_what_a_probe_finds_missing_is_a_reason_that_is_kept_and_told(tmp_path: Path) -> None:
    missing = CannotRun("no flash attention here: sm75\nmore")
    probes = (*worlds.fake_probes(), worlds.fake_probe("attend", []))
    ran: list[str] = []
    failing: dict[str, BaseException] = {"attend": missing, "vram_read@end": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, counted(probes, ran, failing=failing | {"vram_copy": KeyboardInterrupt()})).finish(quiet)
    outcome = run_of(tmp_path, counted(probes, ran, failing={"attend": missing})).finish(quiet)
    assert outcome.skipped == {"attend": "no flash attention here: sm75"}
    assert outcome.record["probes"]["attend"]["skipped"] == "no flash attention here: sm75"


def test_an_output_that_cannot_be_written_is_told_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="it is a folder"):
        run_calibration(device="cpu", quick=True, output=tmp_path)
    with pytest.raises(CannotWrite, match="No such file or directory"):
        run_calibration(device="cpu", quick=True, output=tmp_path / "none" / "toy.json")


def test_an_unknown_device_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="unknown device 'gpu0'"):
        run_calibration(device="gpu0", quick=True, output=tmp_path / "toy.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"device_free_bytes": 2**30}, "another process"), ({"host_free_bytes": 2**30}, "host memory")],
)
def test_too_little_memory_is_told_before_measuring(changes: dict[str, int], said: str) -> None:
    with pytest.raises(CannotCalibrate) as refused:
        check_room(worlds.machine(**changes))
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
    ],
)
def test_what_a_person_should_know_is_told(changes: dict[str, Any], load: float, said: str) -> None:
    found = cautions.before(worlds.machine(**changes), load=load)
    assert len(found) == 1
    assert said in found[0]


def test_an_idle_machine_draws_no_cautions() -> None:
    machine: Machine = worlds.machine()
    assert cautions.before(machine, load=0.1) == []
    assert cautions.after(machine, worlds.records()) == []


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

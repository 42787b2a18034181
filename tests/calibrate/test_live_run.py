"""`twin validate --device`: other machines are refused, missing kernels say how to get them, records are never lost."""

import errno
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate import live_run
from calibrate.kernel_cases import KernelCase
from calibrate.live_run import check_record, check_same_machine, record, validate_live
from calibrate.measurements import SCHEMA, MeasuredRow, Measurements, read_measurements, to_text
from calibrate.probes.machine import cpu_name
from hwprofiles import load_profile
from hwprofiles.errors import BadFile
from tests.calibrate.measure_worlds import FakeBackend, install_fakes
from twin.errors import CannotWrite, Impossible, TwinError, UnknownName

STEP = KernelCase(metric="decode_step", tier="vram", ctx_tokens=6_145)
GATHER = KernelCase(metric="decode_gather", tier="host", ctx_tokens=6_145)


def ignored(_done: int, _total: int, _case: str) -> None:
    """Progress that nobody watches."""


def row(case: KernelCase, median_s: float) -> MeasuredRow:
    return MeasuredRow(case=case, median_s=median_s, spread=0.0, samples_s=(median_s,), error=0.0, link_bytes=0)


def measurements(*rows: MeasuredRow) -> Measurements:
    return Measurements(schema=SCHEMA, machine="toy", kv_dtype="fp16", made={"date": "2026-11-29"}, rows=rows)


def medians(path: Path) -> dict[str, float]:
    return {row.case.id: row.median_s for row in read_measurements(path).rows}


@pytest.fixture
def own_profile(tmp_path: Path) -> str:
    """The rates of the h200 under the name of this processor: a profile that this machine is taken for."""
    profile = load_profile("h200")
    own = replace(profile, name="own", gpu=replace(profile.gpu, name=cpu_name(), compute_capability="0.0"))
    path = tmp_path / "own.json"
    path.write_bytes(msgspec.json.encode(own))
    return str(path)


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> tuple[KernelCase, ...]:
    cases = (STEP, GATHER)
    monkeypatch.setattr(live_run, "validation_grid", lambda **_asked: list(cases))
    monkeypatch.setattr(live_run, "provenance", lambda device: {"device": device})
    return cases


def use(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    install_fakes(monkeypatch)
    monkeypatch.setattr(live_run, "_backend", lambda _device: backend)


def one_line(refused: TwinError) -> str:
    assert "\n" not in refused.message
    return refused.message


def test_a_profile_of_another_machine_is_refused_in_one_line() -> None:
    with pytest.raises(Impossible) as refused:
        check_same_machine(load_profile("h200"), FakeBackend())  # type: ignore[arg-type]
    message = one_line(refused.value)
    assert "NVIDIA H200" in message
    assert cpu_name() in message
    assert "twin calibrate" in refused.value.hint


def test_another_machine_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    use(backend, monkeypatch)
    with pytest.raises(Impossible):
        validate_live("h200", "cpu", quick=True, curve=False, progress=ignored)
    assert backend.opened == []


def test_an_unknown_profile_is_refused_by_its_name() -> None:
    with pytest.raises(UnknownName, match="h2000"):
        validate_live("h2000", "cpu", quick=True, curve=False, progress=ignored)


def test_this_processor_has_a_name() -> None:
    assert cpu_name()
    assert cpu_name() == cpu_name().strip()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_torch_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith("realkernels.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Impossible) as refused:
        validate_live("h200", device, quick=True, curve=False, progress=ignored)
    assert one_line(refused.value) == "torch is not installed"
    assert "pip install 'kv-twin[kernels]'" in refused.value.hint


def test_a_device_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(_device: str) -> Any:
        raise RuntimeError("no CUDA device\nand a long story")

    monkeypatch.setitem(sys.modules, "realkernels.device", SimpleNamespace(open_device=no_gpu))
    with pytest.raises(Impossible) as refused:
        validate_live("h200", "cuda", quick=True, curve=False, progress=ignored)
    assert one_line(refused.value) == "no CUDA device"


def test_what_is_measured_is_compared_with_the_profile(
    monkeypatch: pytest.MonkeyPatch, own_profile: str, two_cases: tuple[KernelCase, ...]
) -> None:
    use(FakeBackend(), monkeypatch)
    told: list[tuple[int, int, str]] = []
    validation, made = validate_live(
        own_profile, "cpu", quick=True, curve=True, progress=lambda *words: told.append(words)
    )
    assert [measured.case for measured in made.rows] == list(two_cases)
    assert {measured.group for measured in made.rows} == {"grid"}
    assert (made.machine, made.kv_dtype, made.made) == ("own", "fp16", {"device": "cpu"})
    assert [case.id for case in validation.cases] == [f"own.{case.id}" for case in two_cases]
    assert [case.measured for case in validation.cases] == [0.01, 0.01]
    assert told == [(0, 2, STEP.id), (1, 2, GATHER.id)]


@pytest.mark.usefixtures("two_cases")
def test_a_group_that_does_not_fit_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, own_profile: str
) -> None:
    use(FakeBackend(refusals={"host": RuntimeError("needs 9 GiB, 1 GiB is free")}), monkeypatch)
    validation, made = validate_live(own_profile, "cpu", quick=True, curve=False, progress=ignored)
    assert [case.id for case in validation.cases] == [f"own.{STEP.id}"]
    assert [(left.case, left.reason) for left in made.left_out] == [(GATHER, "needs 9 GiB, 1 GiB is free")]
    (skipped,) = validation.skipped
    assert (skipped.id, skipped.status, skipped.reason) == (
        f"own.{GATHER.id}", "not_measured", "needs 9 GiB, 1 GiB is free"
    )  # fmt: skip
    assert (validation.counts.predicted, validation.counts.not_measured) == (1, 1)


class Restless(FakeBackend):
    """Measures in two rounds; in the second, what lies in device memory takes twice as long."""

    rounds = 2

    def seconds(self, work: Any, **asked: Any) -> list[float]:
        """Of every repeat."""
        slow = len(self.opened) == 3  # two tiers a round
        return [seconds * (2 if slow else 1) for seconds in super().seconds(work, **asked)]


@pytest.mark.usefixtures("two_cases")
def test_a_case_of_which_a_busy_machine_says_nothing_is_neither_right_nor_wrong(
    monkeypatch: pytest.MonkeyPatch, own_profile: str
) -> None:
    use(Restless(), monkeypatch)
    told: list[tuple[int, int, str]] = []
    validation, made = validate_live(own_profile, "cpu", quick=True, curve=False, progress=lambda *on: told.append(on))
    assert [case.id for case in validation.cases] == [f"own.{GATHER.id}"]
    assert [row.case for row in made.rows] == [GATHER]
    (skipped,) = validation.skipped
    assert skipped.id == f"own.{STEP.id}"
    assert "too busy to tell: the case took 2.00 times as long" in skipped.reason
    assert [done for done, _, _ in told] == [0, 1, 2, 3]
    assert {total for _, total, _ in told} == {4}


@pytest.mark.usefixtures("two_cases")
def test_a_kernel_that_computes_something_else_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, own_profile: str
) -> None:
    use(FakeBackend(error=0.5), monkeypatch)
    with pytest.raises(Impossible) as refused:
        validate_live(own_profile, "cpu", quick=True, curve=False, progress=ignored)
    assert STEP.id in one_line(refused.value)


def test_rows_are_recorded_beside_a_profile_s_file(tmp_path: Path) -> None:
    path = record(measurements(row(STEP, 1e-3)), str(tmp_path / "my.machine.json"))
    assert path == tmp_path / "my.machine.measurements.json"
    assert medians(path) == {STEP.id: 1e-3}
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_a_shipped_machine_are_recorded_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h200").mkdir()
    monkeypatch.setattr("calibrate.measurements.DATA", tmp_path)
    assert record(measurements(row(STEP, 1e-3)), "h200") == tmp_path / "h200" / "measurements.json"


def test_a_record_that_could_not_be_added_to_is_known_before(tmp_path: Path) -> None:
    profile, path = tmp_path / "my.json", tmp_path / "my.measurements.json"
    profile.write_text('{"extends": "h200"}', encoding="utf-8")
    hw = str(profile)
    check_record(hw)
    assert list(tmp_path.iterdir()) == [profile]
    path.write_text("{", encoding="utf-8")
    with pytest.raises(BadFile, match="not valid JSON"):
        check_record(hw)
    path.unlink()
    path.mkdir()
    with pytest.raises(CannotWrite, match="it is a folder"):
        check_record(hw)


@pytest.mark.parametrize("hw", ["", ".", "/", "h20"])
def test_a_record_of_no_machine_is_refused_before(hw: str) -> None:
    with pytest.raises(TwinError):
        check_record(hw)


def test_a_case_measured_again_replaces_its_row_in_the_file(tmp_path: Path) -> None:
    hw = str(tmp_path / "my.json")
    record(measurements(row(STEP, 1e-3), row(GATHER, 2e-3)), hw)
    path = record(measurements(row(STEP, 5e-3)), hw)
    assert medians(path) == {STEP.id: 5e-3, GATHER.id: 2e-3}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    hw = str(tmp_path / "my.json")
    path = record(measurements(row(STEP, 1e-3)), hw)
    before = path.read_bytes()

    def full(*_args: Any, **_named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, full)
        with pytest.raises(CannotWrite) as refused:
            record(measurements(row(STEP, 5e-3)), hw)
    assert "No space left" in one_line(refused.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_old_file_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "my.measurements.json"
    broken = to_text(measurements(row(STEP, 1e-3)))[:-9]
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(BadFile):
        record(measurements(row(STEP, 5e-3)), str(tmp_path / "my.json"))
    assert path.read_text(encoding="utf-8") == broken


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="cannot write"):
        record(measurements(row(STEP, 1e-3)), str(tmp_path / "none" / "my.json"))


def test_the_kernels_of_this_processor_go_through_the_whole_loop(
    monkeypatch: pytest.MonkeyPatch, own_profile: str
) -> None:
    torch = pytest.importorskip("torch")
    cases = [
        KernelCase(metric="decode_step", tier="host", ctx_tokens=2_305, layers=1),
        KernelCase(
            metric="prefill_attention", tier="host", ctx_tokens=2_305, rows=4, mode="staged", bucket_tokens=1_024
        ),
    ]
    monkeypatch.setattr(live_run, "validation_grid", lambda **_asked: cases)
    monkeypatch.setattr("calibrate.measure.LEAST_MEASURED_S", 0.0)
    monkeypatch.setattr("calibrate.rounds.UNSTEADY", math.inf)
    threads = torch.get_num_threads()
    try:
        validation, made = validate_live(own_profile, "cpu", quick=True, curve=False, progress=ignored)
    finally:
        torch.set_num_threads(threads)
    assert [measured.case for measured in made.rows] == cases
    assert made.made.keys() >= {"date", "torch", "python", "commit", "command"}
    staged = validation.cases[1].also
    assert staged["link_bytes_predicted"] == pytest.approx(staged["link_bytes_measured"], rel=1e-12)
    assert medians(record(made, own_profile)).keys() == {case.id for case in cases}

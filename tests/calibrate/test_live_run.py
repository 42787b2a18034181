"""`twin validate --device`: other machines are refused, missing kernels say how to get them, records are never lost."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate import live
from calibrate.live import check_same_machine, validate_live
from calibrate.machine.description import cpu_name, describe
from calibrate.measurements import (
    SCHEMA,
    LeftOutRow,
    MeasuredRow,
    Measurements,
    check_record,
    read_measurements,
    record,
    row_of,
    to_text,
)
from calibrate.operations.table import Case
from calibrate.probes import WrongData
from calibrate.validation import Validation
from hwprofiles import load_profile
from hwprofiles.errors import BadFile
from tests.calibrate.call_worlds import FakeDevice
from twin.errors import CannotWrite, Impossible, TwinError, UnknownName

STEP = Case(operation="decode_step", at={"tier": "vram", "ctx_tokens": 6_145, "layers": 2})
GATHER = Case(operation="decode_gather", at={"tier": "host", "ctx_tokens": 6_145, "layers": 2})
FP32 = Case(operation="product", at={"dtype": "fp32", "tokens": 3, "rows": 64, "columns": 64})
"""Of which the h200 has no rate."""


def run(hw: str, device: str = "cpu") -> tuple[Validation, Measurements]:
    return validate_live(hw, device, quick=True, groups=["grid"], progress=lambda *_told: None)


def row(case: Case, median_s: float) -> MeasuredRow:
    return row_of(case, [median_s], error=0.0, link_bytes=0, group="grid")


def measurements(*rows: MeasuredRow) -> Measurements:
    return Measurements(schema=SCHEMA, machine="toy", kv_dtype="fp16", made={"grid": {"date": "2026-11-29"}}, rows=rows)


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
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What measuring gives, case by case, where three cases are asked for; and how often the device measures."""
    outcomes: list[Any] = [row(STEP, 0.01), row(GATHER, 0.02)]

    def measure(cases: Any, _backend: Any, _machine: Any, *, progress: Any, **_given: Any) -> Any:
        assert list(cases) == [STEP, GATHER]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            progress(outcome.case)
            yield outcome

    monkeypatch.setattr(live, "measure", measure)
    monkeypatch.setattr(live, "held_out_cases", lambda *_group, **_given: [STEP, GATHER, FP32])
    monkeypatch.setattr(live, "provenance", lambda _machine, command: {"command": command})
    monkeypatch.setattr(live, "open_checked", lambda *_: FakeDevice())
    monkeypatch.setattr(live, "describe", lambda _device, dtype: describe("cpu", dtype=dtype))
    return outcomes


def one_line(refused: TwinError) -> str:
    assert "\n" not in refused.message
    return refused.message


def test_another_machine_or_an_unknown_one_is_refused_in_one_line_before_anything_is_measured(
    measured: list[Any],
) -> None:
    measured[:] = [AssertionError("measured")]
    for refusing in (lambda: check_same_machine(load_profile("h200"), describe("cpu")), lambda: run("h200")):
        with pytest.raises(Impossible) as refused:
            refusing()
        assert "NVIDIA H200" in one_line(refused.value)
        assert cpu_name() in one_line(refused.value)
        assert "twin calibrate" in refused.value.hint
    with pytest.raises(UnknownName, match="h2000"):
        run("h2000")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_torch_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith("realkernels.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Impossible) as refused:
        run("h200", device)
    assert one_line(refused.value) == "torch is not installed"
    assert "pip install 'kv-twin[kernels]'" in refused.value.hint


def test_a_device_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(_device: str) -> Any:
        raise RuntimeError("no CUDA device\nand a long story")

    monkeypatch.setitem(sys.modules, "realkernels.device", SimpleNamespace(open_device=no_gpu))
    with pytest.raises(Impossible) as refused:
        run("h200", "cuda")
    assert one_line(refused.value) == "no CUDA device"


@pytest.mark.usefixtures("measured")
def test_what_is_measured_is_compared_and_what_has_no_rate_is_left_out(own_profile: str) -> None:
    told: list[tuple[int, int, str]] = []
    validation, made = validate_live(
        own_profile, "cpu", quick=True, groups=["grid"], progress=lambda *words: told.append(words)
    )
    assert [measured.case for measured in made.rows] == [STEP, GATHER]
    assert (made.machine, made.kv_dtype) == ("own", "fp16")
    assert made.made == {"grid": {"command": "twin validate --device cpu --quick --group grid --record"}}
    assert [case.id for case in validation.cases] == [f"own.{case.id}" for case in (STEP, GATHER)]
    assert [case.measured for case in validation.cases] == [0.01, 0.02]
    assert told == [(0, 2, STEP.id), (1, 2, GATHER.id)]
    (left,) = made.left_out
    assert left == LeftOutRow(case=FP32, reason="profile own has no rate for linear/twin/fp32")
    (skipped,) = validation.skipped
    assert (skipped.id, skipped.status, skipped.reason) == (f"own.{FP32.id}", "not_measured", left.reason)
    assert (validation.counts.predicted, validation.counts.not_measured) == (2, 1)


def test_what_rounds_disagree_about_is_neither_right_nor_wrong(
    monkeypatch: pytest.MonkeyPatch, own_profile: str, measured: list[Any]
) -> None:
    monkeypatch.setattr(FakeDevice, "rounds", 2)
    waiting = iter([(row(STEP, 0.01), row(GATHER, 0.02)), (row(STEP, 0.02), row(GATHER, 0.02))])
    monkeypatch.setattr(live, "measure", lambda *_given, **_named: iter(next(waiting)))
    validation, made = run(own_profile)
    assert [row.case for row in made.rows] == [GATHER]
    assert "too busy to tell: the case took 2.00 times as long" in validation.skipped[1].reason
    assert measured


def test_wrong_results_and_nothing_measured_are_refused_in_one_line(own_profile: str, measured: list[Any]) -> None:
    for outcomes, told in (
        ([WrongData(f"{STEP.id}: wrong")], STEP.id),
        ([LeftOutRow(case=STEP, reason="needs 9 GiB")], "nothing could be measured"),
    ):
        measured[:] = outcomes
        with pytest.raises(Impossible) as refused:
            run(own_profile)
        assert told in one_line(refused.value)


def test_the_kernels_of_this_processor_go_through_the_whole_loop(
    monkeypatch: pytest.MonkeyPatch, own_profile: str
) -> None:
    torch = pytest.importorskip("torch")
    at = {"tier": "host", "ctx_tokens": 2_305, "q_tokens": 4, "copies": "serial", "bucket_tokens": 1_024}
    cases = [replace(STEP, at=STEP.at | {"ctx_tokens": 2_305}), Case(operation="prefill_attention", at=at)]
    monkeypatch.setattr(live, "held_out_cases", lambda *_group, **_given: cases)
    monkeypatch.setattr("calibrate.measure.UNSTEADY", 1e9)
    threads = torch.get_num_threads()
    try:
        validation, made = run(own_profile)
    finally:
        torch.set_num_threads(threads)
    assert [measured.case for measured in made.rows] == cases
    assert made.made["grid"].keys() >= {"date", "torch", "python", "commit", "command", "code"}
    staged = validation.cases[1].also
    assert staged["link_bytes_predicted"] == pytest.approx(staged["link_bytes_measured"], rel=1e-12)
    assert medians(record(made, own_profile)).keys() == {case.id for case in cases}


# The record


def test_rows_are_recorded_beside_a_profile_s_file_or_in_a_shipped_machine_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hw = str(tmp_path / "my.machine.json")
    path = record(measurements(row(STEP, 1e-3), row(GATHER, 2e-3)), hw)
    assert path == tmp_path / "my.machine.measurements.json"
    assert list(tmp_path.iterdir()) == [path]
    assert medians(record(measurements(row(STEP, 5e-3)), hw)) == {STEP.id: 5e-3, GATHER.id: 2e-3}
    (tmp_path / "h200").mkdir()
    monkeypatch.setattr("calibrate.measurements.RECORDS", tmp_path)
    assert record(measurements(row(STEP, 1e-3)), "h200") == tmp_path / "h200" / "measurements.json"


def test_a_record_that_could_not_be_added_to_is_known_before_and_never_written_over(tmp_path: Path) -> None:
    profile, path = tmp_path / "my.json", tmp_path / "my.measurements.json"
    profile.write_text('{"extends": "h200"}', encoding="utf-8")
    check_record(str(profile))
    assert list(tmp_path.iterdir()) == [profile]
    broken = to_text(measurements(row(STEP, 1e-3)))[:-9]
    path.write_text(broken, encoding="utf-8")
    for refusing in (lambda: check_record(str(profile)), lambda: record(measurements(row(STEP, 5e-3)), str(profile))):
        with pytest.raises(BadFile, match="not valid JSON"):
            refusing()
    assert path.read_text(encoding="utf-8") == broken
    path.unlink()
    path.mkdir()
    with pytest.raises(CannotWrite, match="it is a folder"):
        check_record(str(profile))
    with pytest.raises(CannotWrite, match="cannot write"):
        record(measurements(row(STEP, 1e-3)), str(tmp_path / "none" / "my.json"))


@pytest.mark.parametrize("hw", ["", ".", "/", "h20"])
def test_a_record_of_no_machine_is_refused_before(hw: str) -> None:
    with pytest.raises(TwinError):
        check_record(hw)


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

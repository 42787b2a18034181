"""Everything recorded at once: published rows and own measurements of every machine, or of one by name."""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.live import validate_measured
from calibrate.measurements import measured_machines, record, shipped_measurements
from calibrate.operations.table import Case
from calibrate.published.cases import recorded_machines
from calibrate.published.recorded import validate_recorded
from calibrate.records import validate_records
from hwprofiles import load_profile, profile_names
from hwprofiles.store import shipped_document
from twin.errors import BadFile, UnknownName

MACHINES = sorted({*recorded_machines(), *measured_machines()})


def test_everything_is_the_sum_of_its_machines_within_tolerance_and_with_ids_of_its_own() -> None:
    everything = validate_records()
    assert {"3x-rtx3090", "h200", "rtx3090"} <= set(MACHINES) <= set(profile_names())
    assert everything.machine == ", ".join(MACHINES)
    own = validate_measured(shipped_measurements("h200"), load_profile("h200"))
    assert validate_records("h200") == own
    parts = {name: validate_recorded(name) for name in recorded_machines()} | {"h200": own}
    assert [case for machine in MACHINES for case in parts[machine].cases] == list(everything.cases)
    assert sum(part.counts.predicted for part in parts.values()) == everything.counts.predicted
    for role in ("fit", "held_out"):
        counted = sum(getattr(part.summary, role).n for part in parts.values())
        assert getattr(everything.summary, role).n == counted
    ids = [case.id for case in everything.cases]
    assert len(set(ids)) == len(ids)
    assert everything.summary.held_out.n > everything.summary.fit.n > 0
    assert everything.outside == []
    plain = json.loads(json.dumps(msgspec.to_builtins(everything), allow_nan=False))
    assert (plain["schema"], len(plain["cases"])) == ("twin.validation/1", len(ids))


@pytest.mark.parametrize(("name", "meant"), [("h", "h200"), ("3x-rtz3090", "3x-rtx3090")])
def test_an_unknown_machine_is_refused_with_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(UnknownName) as refused:
        validate_records(name)
    assert name in refused.value.message
    assert f"did you mean {meant}?" in refused.value.hint


def test_what_was_recorded_beside_a_profile_of_one_s_own_is_read_back(tmp_path: Path) -> None:
    """As the command that measures and the one that reads are told: by the same path."""
    profile = tmp_path / "me.json"
    profile.write_text(json.dumps(shipped_document("h200")), encoding="utf-8")
    with pytest.raises(BadFile, match=f"nothing is recorded of {profile}") as refused:
        validate_records(str(profile))
    assert "--record" in refused.value.hint
    made = shipped_measurements("h200")
    record(replace(made, rows=made.rows[:3], left_out=()), str(profile))
    assert validate_records(str(profile)).cases == validate_records("h200").cases[:3]


def test_a_record_of_a_case_that_cannot_be_is_refused_by_its_file(tmp_path: Path) -> None:
    profile, made = tmp_path / "me.json", shipped_measurements("h200")
    profile.write_text('{"extends": "h200"}', encoding="utf-8")
    case = Case(operation="decode_select", at={"tier": "vram", "ctx_tokens": 1, "layers": 1})
    record(replace(made, rows=(replace(made.rows[0], case=case),), left_out=()), str(profile))
    with pytest.raises(BadFile, match="nothing to time") as refused:
        validate_records(str(profile))
    assert refused.value.message.startswith(f"{tmp_path / 'me.measurements.json'}: ")


def test_a_machine_without_records_is_refused_with_those_that_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibrate.records.recorded_machines", lambda: ["3x-rtx3090"])
    with pytest.raises(UnknownName) as refused:
        validate_records("rtx3090")
    assert all(machine in refused.value.hint for machine in ("3x-rtx3090", *measured_machines()))

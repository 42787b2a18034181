"""Every public row is asked or told why not, compared in its own unit, and apart where it or its curve set a rate."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibrate.published.estimates import NoAnswer
from calibrate.published.figures import FIGURES
from calibrate.published.public import (
    PublicComparison,
    architecture,
    fitted_ids,
    groups_text,
    public_text,
    validate_public,
)
from calibrate.published.public_cases import (
    FOLDER,
    ROWS,
    PublicCase,
    PublicCases,
    PublicRow,
    PublicRows,
    joined,
    load_public,
    model_files,
    model_of,
    question_of,
)
from calibrate.published.public_figures import PUBLIC_FIGURES
from twin.models import load_model

KINDS = {
    "decode": 64, "prefill": 38, "kv_pool": 29, "bug": 25, "bandwidth": 20, "vram": 17, "kv_size": 6, "ttft": 3,
    "fit": 1, "decode_ratio": 1,
}  # fmt: skip
"""Rows of each kind that were collected: 204."""
COLLECTED = "3addd4a53ea0b09c02c7c9acf655d36d9ab1bd86d70e0689d9f824183f04faec"
"""Of the rows as they were collected: what somebody published is not edited."""


def row(**other: Any) -> PublicRow:
    plain = {
        "id": "a", "kind": "decode", "model": {}, "hardware": {}, "backend": "", "kv_layout": None, "ctx": 1,
        "batch": 1, "metric": "m", "value": 2.0, "unit": "tok/s", "source": "x", "confidence": "high", "note": "",
    }  # fmt: skip
    return msgspec.convert(plain | other, PublicRow)


def case(**other: Any) -> dict[str, Any]:
    return {"id": "a", "curve": "c", "figure": "decode", "ask": {"ctx_tokens": 1, "model": "llama-3.1-8b"}} | other


def told(
    *cases: dict[str, Any], not_asked: tuple[dict[str, Any], ...] = (), kinds: tuple[str, ...] = ("decode",)
) -> Any:
    tolerances = {kind: {"tolerance": 0.1, "reason": "for a test"} for kind in kinds}
    return {
        "schema": "twin.public_cases/1",
        "tolerances": tolerances,
        "cases": list(cases),
        "not_asked": list(not_asked),
    }


def public(rows: tuple[PublicRow, ...], table: Any) -> Any:
    return joined(rows, msgspec.convert(table, PublicCases))


def test_all_rows_that_were_collected_are_kept_with_what_their_publishers_said() -> None:
    rows = msgspec.json.decode(ROWS[0].read_bytes(), type=PublicRows).rows
    assert {kind: sum(row.kind == kind for row in rows) for kind in KINDS} == KINDS
    assert len(rows) == sum(KINDS.values())
    raw = json.loads(ROWS[0].read_text(encoding="utf-8"))["rows"]
    assert all(getattr(kept, key) == value for kept, each in zip(rows, raw, strict=True) for key, value in each.items())
    assert hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest() == COLLECTED


def test_every_row_has_exactly_one_case_or_reason() -> None:
    own = load_public()
    assert {row.id for row in own.rows} == own.cases.keys() | own.not_asked.keys()
    assert not own.cases.keys() & own.not_asked.keys()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (told(), "'a' is passed over"),
        (told(case(), case()), "'a' is spoken of twice or not there"),
        (told(case(), not_asked=({"ids": ["a"], "because": "card", "reason": "none"},)), "'a' is spoken of twice"),
        (told(case(), case(id="b")), "'b' is spoken of twice or not there"),
        (told(case(), kinds=()), "kind 'decode' has no tolerance"),
    ],
)
def test_a_row_without_or_with_two_answers_or_without_a_tolerance_is_refused(table: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        public((row(),), table)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"figure": "speed"}, "figure 'speed' is not one of"),
        ({"figure": "decode_ratio"}, "'against' goes with"),
        ({"figure": "total_time"}, "'workload' goes with"),
        ({"value": 3.0}, "'because' go together"),
        ({"unit": "s"}, "'value'"),
        ({"tolerance": 0.1}, "'tolerance' and 'reason' go together"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_a_case_that_says_half_of_something_is_refused(other: dict[str, Any], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert(case(**other), PublicCase)


def test_a_row_without_a_right_value_needs_one_from_its_case() -> None:
    bare = (row(value=None),)
    with pytest.raises(ValueError, match="what is right"):
        public(bare, told(case()))
    assert public(bare, told(case(value=3.0, because="a log"))).cases["a"].value == 3.0


def test_figures_and_rows_are_in_units_of_one_thing() -> None:
    own = load_public()
    for comparison in validate_public(("bw-", "vram", "lm-1862", "fit", "fail", "K1")).cases:
        assert isinstance(comparison, PublicComparison)
        assert comparison.unit == (own.cases[comparison.id].unit or next(
            row.unit for row in own.rows if row.id == comparison.id
        ))  # fmt: skip


def test_rows_of_one_curve_share_a_model_and_an_engine() -> None:
    curves: dict[str, set[tuple[str, str]]] = {}
    for each in load_public().cases.values():
        if not each.curve.startswith("host-"):
            told = (str(each.ask["model"]), str(each.ask.get("engine", "")).partition("==")[0])
            curves.setdefault(each.curve, set()).add(told)
    several = {curve for curve, told in curves.items() if len(told) > 1}
    assert several <= {"llmd-planner", "syv-long-context"}  # one host and engine with several models; one document


def test_models_beside_the_cases_are_all_asked_about_and_can_be_read() -> None:
    asked = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json"))
    files = model_files()
    assert all(f'"models/{path.name}"' in asked for path in files)
    assert all(load_model(str(path)).summary for path in files)
    named = {model_of(table) for each in load_public().cases.values() for table in (each.ask, each.against) if table}
    assert {name for name in named if name.endswith(".json")} <= {str(path) for path in files}


def test_whatever_differs_from_the_question_is_said_with_its_name() -> None:
    for each in load_public().cases.values():
        assert all(name and said for name, said in each.differs.items()), each.id


def test_bandwidths_of_a_host_are_held_out_together_and_compared_with_a_data_sheet() -> None:
    found = [case for case in validate_public(("bw-",)).cases if isinstance(case, PublicComparison)]
    assert len(found) >= 13
    assert all(case.curve.startswith("host-") and case.has_interval for case in found)
    assert {case.role for case in found} == {"held_out"}
    covered = sum(case.covered for case in found) / len(found)
    assert covered >= 0.7


def test_counts_of_public_rows_are_exact() -> None:
    rows = ("K07", "K09", "K15", "K16", "K17", "bug-gemma4-12b", "bug-mla-as-mha", "bug-head-dim", "exl2-425")
    for each in validate_public(rows).cases:
        assert each.error == pytest.approx(0, abs=1e-5), each.id


def test_the_wrong_value_of_a_defect_is_outside_the_tolerance_of_the_right_one() -> None:
    own = load_public()
    for row_ in own.rows:
        found = own.cases.get(row_.id)
        if row_.kind != "bug" or found is None or found.value is not None or row_.wrong_value is None:
            continue
        tolerance = found.tolerance if found.tolerance is not None else own.tolerances["bug"].tolerance
        right, wrong = float(row_.value or 0), float(row_.wrong_value)
        assert abs(wrong - right) > tolerance * (right or 1), row_.id


def test_a_row_is_fit_where_any_file_or_rulebook_says_that_it_set_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "blog.vram_model" in fitted_ids()  # of exllamav3's rulebook
    (tmp_path / "kernels").mkdir()
    rate = {"a": [{"fitted_on": ["K16-4b", "K13-1"]}]}
    (tmp_path / "kernels" / "own.json").write_text(json.dumps(rate))
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "notes.json").write_text(json.dumps({"fitted_on": ["K15"]}))
    monkeypatch.setattr("calibrate.published.public.MACHINES_ROOM", tmp_path)
    found = {case.id: case for case in validate_public(("K13-", "K15", "K16")).cases}
    kinds = {id_: (case.role, getattr(case, "curve_seen", None)) for id_, case in found.items()}
    assert kinds["K13-1"] == kinds["K16-4b"] == ("fit", False)
    assert kinds["K13-256"] == ("held_out", True)
    assert kinds["K15"] == kinds["K16-72b"] == ("held_out", False)
    assert found["K13-1"].role_reason == "sets kernels/own"


def test_a_question_that_cannot_be_asked_yet_is_told_in_the_twins_own_line() -> None:
    with pytest.raises(NoAnswer, match="unknown field `no_such`"):
        question_of({"ctx_tokens": 1, "model": "llama-3.1-8b", "no_such": 2})


def test_an_interval_holds_its_prediction() -> None:
    for case in validate_public().cases:
        if isinstance(case, PublicComparison) and case.low is not None and case.high is not None:
            assert case.low <= case.predicted <= case.high, case.id


def test_speeds_and_memory_are_each_judged_together() -> None:
    sorts = [group for group in validate_public(("exl3-100-6-1-2k", "exl2")).groups if group.by == "sort"]
    assert [(group.name, group.fit.n + group.held_out.n) for group in sorts] == [("speed", 2), ("memory", 2)]


def test_architectures_are_told_apart() -> None:
    kinds = {
        "llama-3.1-8b": "full attention", "qwen3-30b-a3b": "full attention, experts", "qwen3.8-27b": "recurrent",
        "deepseek-r1": "latent attention, experts", "gemma-4-26b-a4b": "windows, experts",
        "qwen3.8-flash-next": "sparse attention, recurrent, experts",
    }  # fmt: skip
    assert {name: architecture(load_model(name)) for name in kinds} == kinds


def test_the_text_has_a_line_a_row_and_a_line_a_group() -> None:
    found = validate_public(("K16", "K20", "K30"))
    text = public_text(found)
    assert all(id_ in text for id_ in ("K16-4b", "K16-72b", "K20: not_a_figure", "K30"))
    assert text.endswith("3 rows asked, 3 answered, 0 outside; 1 not asked (1 not a figure)\n")
    assert groups_text(found.groups) in text
    assert [group.name for group in found.groups if group.by in {"sort", "kind"}] == ["tried", "tried"]
    kind = next(group for group in found.groups if group.by == "kind")
    assert kind.held_out.n == 3
    assert kind.fit.n == 0


def test_every_figure_that_only_public_rows_have_is_asked_for_somewhere() -> None:
    used = {each.figure for each in load_public().cases.values()}
    assert PUBLIC_FIGURES.keys() - FIGURES.keys() <= used <= PUBLIC_FIGURES.keys()

"""Case data is read strictly: whatever is malformed, unknown, doubled or asked otherwise than measured, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.cases import load_recorded, read_recorded
from calibrate.figures import FIGURES
from hwprofiles.store import DATA
from twin.errors import BadFile

SHIPPED = DATA / "3x-rtx3090" / "cases.json"

Edit = Callable[[dict[str, Any]], object]


def case(data: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(case for case in data["cases"] if case["id"] == name)
    return found


def read_edited(folder: Path, edit: Edit) -> None:
    data = json.loads(SHIPPED.read_text(encoding="utf-8"))
    edit(data)
    path = folder / "cases.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    read_recorded(path)


WRONG: dict[str, tuple[Edit, str]] = {
    "unknown id": (lambda data: case(data, "blog.yarn").update(id="blog.yarm"), "blog.yarm"),
    "doubled id": (lambda data: data["cases"].append(data["cases"][0]), "appears twice"),
    "row left out": (lambda data: data["cases"].pop(), "neither a case nor a rule"),
    "unknown key": (lambda data: case(data, "blog.yarn").update(tolerence=0.1), "tolerence"),
    "unknown key of the question": (lambda data: case(data, "blog.yarn")["ask"].update(context=1), "context"),
    "unknown figure": (lambda data: case(data, "blog.yarn").update(figure="yarn"), "figure 'yarn'"),
    "figure in another unit": (lambda data: case(data, "blog.yarn").update(figure="vram_total"), "in 'GiB'"),
    "no tolerance": (lambda data: case(data, "blog.yarn").pop("tolerance"), "tolerance"),
    "two tolerances": (lambda data: case(data, "blog.yarn").update(tolerance_absolute=1), "tolerance"),
    "negative tolerance": (lambda data: case(data, "blog.yarn").update(tolerance=-0.1), "tolerance"),
    "tolerance of all": (lambda data: case(data, "blog.yarn").update(tolerance=1.1), "tolerance"),
    "tolerance as text": (lambda data: case(data, "blog.yarn").update(tolerance="0.1"), "tolerance"),
    "no reason": (lambda data: case(data, "blog.yarn").update(reason=""), "reason"),
    "no question": (lambda data: case(data, "blog.yarn").pop("ask"), "ask"),
    "another context": (lambda data: case(data, "blog.decode_1M")["ask"].update(ctx_tokens=2**20), "1048320"),
    "another layout": (lambda data: case(data, "blog.decode_1M")["ask"].update(layout="vram"), "'offload' was"),
    "another model": (lambda data: case(data, "blog.yarn")["ask"].update(model="gpt-2"), "'gpt-2' is asked"),
    "half a pair": (lambda data: case(data, "blog.decode_drop").pop("against"), "against"),
    "repeats nothing": (lambda data: case(data, "blog.ttft_1M").update(same_as=["blog.ttft"]), "same_as"),
    "repeats itself": (lambda data: case(data, "blog.ttft_1M").update(same_as=["blog.ttft_1M"]), "same_as"),
    "rule without a row": (lambda data: data["skipped"][0].update(metric="perplexty"), "takes no row"),
    "rule without a reason": (lambda data: data["skipped"][0].pop("reason"), "reason"),
    "unknown status": (lambda data: data["skipped"][0].update(status="dropped"), "status"),
    "another schema": (lambda data: data.update(schema="twin.cases/2"), "twin.cases/2"),
    "rows from elsewhere": (lambda data: data.update(published="../../secret.json"), "published"),
    "rows from nowhere": (lambda data: data.update(published="nothing.json"), "cannot be read"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_case_data_is_refused_in_one_line(wrong: str, tmp_path: Path) -> None:
    edit, said = WRONG[wrong]
    with pytest.raises(BadFile) as refusal:
        read_edited(tmp_path, edit)
    assert said in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": NaN}', '{"schema": 1, "schema": 2}'])
def test_what_is_no_case_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadFile) as refusal:
        read_recorded(path)
    assert str(path) in refusal.value.message
    assert "\n" not in refusal.value.message


def test_the_shipped_cases_read_back_unedited(tmp_path: Path) -> None:
    read_edited(tmp_path, lambda data: data)


def test_every_figure_is_asked_for_somewhere() -> None:
    assert {case.figure for case in load_recorded("3x-rtx3090").cases} == FIGURES.keys()

"""Rows and cases are read strictly: malformed, unknown, doubled, or asked otherwise than measured, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibrate.published.cases import (
    Ask,
    Published,
    Recorded,
    RecordedCase,
    Row,
    load_recorded,
    read_recorded,
    recorded_machines,
)
from calibrate.published.estimates import Load
from calibrate.published.figures import FIGURES
from hwprofiles.store import RECORDS
from twin.errors import BadFile

BLOG, VLLM = "3x-rtx3090", "rtx3090"

Edit = Callable[[dict[str, Any]], object]


def case(data: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(case for case in data["cases"] if case["id"] == name)
    return found


def edited(folder: Path, edit: Edit, *, machine: str = BLOG) -> Path:
    """The machine's case file with something changed."""
    data = json.loads((RECORDS / machine / "cases.json").read_text(encoding="utf-8"))
    edit(data)
    path = folder / "cases.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadFile) as refused:
        read_recorded(path)
    assert "\n" not in refused.value.message
    return refused.value.message


def joined(*, value: bool | float = 2048, unit: str = "B", conditions: dict[str, Any] | None = None,
           **changes: Any) -> Recorded:  # fmt: skip
    """One row of vLLM's and its case, as one machine's records."""
    fields = {"ask": Ask(ctx_tokens=1, model="qwen3.8-27b", kv_dtype="fp8"), "figure": "kv_bytes_per_token_per_layer"}
    case = RecordedCase(id="row", tolerance=0.1, reason="for a test", **(fields | changes))
    row = Row(id="row", system="s", metric="m", value=value, unit=unit, source="x", conditions=conditions or {})
    return Recorded(machine="toy", rows=(row,), cases=(case,), rules=())


def row(**other: Any) -> dict[str, Any]:
    plain = {"id": "a", "system": "s", "metric": "m", "value": 1, "unit": "s", "source": "x", "conditions": {}}
    return plain | other


def test_a_value_is_a_number_a_range_or_a_yes_and_ids_and_the_schema_are_held() -> None:
    for value, ends in (([15, 20], (15, 17.5, 20)), (6.2, (6.2, 6.2, 6.2)), (True, (1, 1, 1))):
        read = msgspec.convert(row(value=value), Row)
        assert (read.low, read.middle, read.high) == ends
    for value in ("fast", None, [1, 2, 3], {"low": 1}):
        with pytest.raises(msgspec.ValidationError, match="value"):
            msgspec.convert(row(value=value), Row)
    for schema, rows, says in (
        ("twin.published/1", [row(), row()], "row 'a' appears twice"),
        ("twin.published/2", [], r"twin\.published/1"),
    ):
        with pytest.raises(msgspec.ValidationError, match=says):
            msgspec.convert({"schema": schema, "note": "", "rows": rows}, Published)


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
    "unknown model": (lambda data: case(data, "blog.yarn")["ask"].update(model="gpt-2"), "blog.yarn: unknown model"),
    "no context": (lambda data: case(data, "blog.yarn")["ask"].update(ctx_tokens=0), "blog.yarn: context 0"),
    "half a pair": (lambda data: case(data, "blog.decode_drop").pop("against"), "against"),
    "repeats nothing": (lambda data: case(data, "blog.ttft_1M").update(same_as=["blog.ttft"]), "same_as"),
    "repeats itself": (lambda data: case(data, "blog.ttft_1M").update(same_as=["blog.ttft_1M"]), "same_as"),
    "a workload for one request": (
        lambda data: case(data, "blog.yarn").update(workload={"requests": 1, "prompt_tokens": 1, "output_tokens": 1}),
        "'workload' goes with",
    ),
    "a system too many": (lambda data: data["systems"].append("vllm-27b"), "neither a case nor a rule"),
    "a system too few": (lambda data: data["systems"].clear(), "no published row has this id"),
    "another schema": (lambda data: data.update(schema="twin.cases/2"), "twin.cases/2"),
    "rows from elsewhere": (lambda data: data.update(published="../../secret.json"), "published"),
    "rows from nowhere": (lambda data: data.update(published="nothing.json"), "cannot be read"),
}


FP8, MTP, SERVED = "vllm.u93.fp8.tpot100k", "vllm.spec112k.mtp3-fp8.list.decode", "vllm.4x60k.fp8.total"

WRONG_SERVED: dict[str, tuple[Edit, str]] = {
    "rule without a row": (lambda data: data["skipped"][0].update(metric="perplexty"), "neither a case nor a rule"),
    "second rule for the same": (lambda data: data["skipped"].append(data["skipped"][0]), "takes no row"),
    "rule without a reason": (lambda data: data["skipped"][0].pop("reason"), "reason"),
    "unknown status": (lambda data: data["skipped"][0].update(status="dropped"), "status"),
    "another format": (lambda data: case(data, FP8)["ask"].update(kv_dtype="bf16"), "kv_dtype 'bf16' is asked"),
    "another back end": (lambda data: case(data, FP8)["ask"].update(backend="triton"), "backend 'triton' is asked"),
    "another share": (lambda data: case(data, FP8)["ask"].update(utilisation=0.9), "utilisation 0.9 is asked, 0.93"),
    "no share": (lambda data: case(data, FP8)["ask"].pop("utilisation"), "utilisation None is asked, 0.93"),
    "another model": (
        lambda data: case(data, "vllm.bytes_bf16")["ask"].update(model="llama-3.1-8b", engine="vllm"),
        "model 'llama-3.1-8b' is asked",
    ),
    "another prompt": (lambda data: case(data, SERVED)["ask"].update(ctx_tokens=6000), "ctx_tokens 6000 is asked"),
    "another drafter": (
        lambda data: case(data, MTP)["ask"].update(speculation="dflash2:7"),
        "speculation 'dflash2' is asked, 'mtp' was measured",
    ),
    "no drafter": (
        lambda data: [case(data, MTP)["ask"].pop(key) for key in ("speculation", "accepted")],
        "speculation 'none' is asked, 'mtp' was measured",
    ),
    "an acceptance above the drafts": (lambda data: case(data, MTP)["ask"].update(accepted=5), f"{MTP}: accepted"),
    "no workload": (lambda data: case(data, SERVED).pop("workload"), "'workload' goes with"),
    "no requests": (lambda data: case(data, SERVED)["workload"].update(requests=0), "requests"),
    "too many requests": (lambda data: case(data, SERVED)["workload"].update(requests=10**6 + 1), "requests"),
    "a workload without prompts": (lambda data: case(data, SERVED)["workload"].pop("prompt_tokens"), "prompt_tokens"),
    "unknown key of a workload": (lambda data: case(data, SERVED)["workload"].update(rate=1), "rate"),
    "a difference without a reason": (lambda data: case(data, FP8).update(differs={"backend": ""}), "differs"),
}


@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_SERVED])
def test_wrong_case_data_is_refused_in_one_line(wrong: str, tmp_path: Path) -> None:
    edit, said = (WRONG | WRONG_SERVED)[wrong]
    assert said in refusal(edited(tmp_path, edit, machine=BLOG if wrong in WRONG else VLLM))


@pytest.mark.parametrize("conditions", [
    {"layout": "fp8"}, {"layout": "fp8, paged"}, {"layout": "vram"}, {"ctx": 1}, {"ctx": 1, "prompt": 7},
    {"prompt": 1, "output": 5},
    {"model": "Qwen3.8-27B 4-bit weights"}, {"engine": "vLLM 0.28.0"}, {"backend": "FlashInfer"}, {"mode": "batch"},
    {"speculation": "mtp3-fp8"}, {"speculation": "MTP-3, one request"}, {"speculation": "mtp"},
])  # fmt: skip
def test_a_question_that_shares_what_a_row_says_is_taken(conditions: dict[str, Any]) -> None:
    ask = Ask(ctx_tokens=1, model="qwen3.8-27b", kv_dtype="fp8")
    if "speculation" in conditions:  # a drafter is known by how its name begins
        ask = msgspec.structs.replace(ask, speculation="mtp:3", accepted=2.0)
    assert joined(conditions=conditions, ask=ask).cases


@pytest.mark.parametrize(("key", "conditions"), [
    ("kv_dtype", {"layout": "bf16"}), ("layout", {"layout": "offload"}), ("ctx_tokens", {"ctx": 2}),
    ("ctx_tokens", {"prompt": 2}), ("model", {"model": "Qwen3.8-Flash"}), ("engine", {"engine": "exllamav3"}),
    ("utilisation", {"util": 0.9}), ("backend", {"backend": "Triton"}), ("speculation", {"speculation": "MTP-3"}),
])  # fmt: skip
def test_a_difference_is_refused_unless_the_case_says_why(key: str, conditions: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"row: {key} .* is asked, .* was measured"):
        joined(conditions=conditions)
    assert joined(conditions=conditions, differs={key: "on purpose"}).cases


def test_a_yes_or_a_no_can_be_compared_and_any_other_nothing_cannot() -> None:
    for answer in (True, False):
        assert joined(value=answer, unit="", figure="starts").rows[0].middle == float(answer)
    for nothing in (0.0, -1.0):
        with pytest.raises(ValueError, match="not a positive number or range"):
            joined(value=nothing)


def test_a_workload_goes_with_a_figure_of_many_requests_and_with_no_other() -> None:
    load = Load(requests=1, prompt_tokens=1, output_tokens=1)
    for fields in ({"workload": load}, {"figure": "total_time"}):
        with pytest.raises(ValueError, match="'workload' goes with a figure of many requests"):
            joined(unit="s", **fields)
    assert joined(unit="s", figure="total_time", workload=load).cases


@pytest.mark.parametrize("machine", recorded_machines())
def test_the_shipped_cases_read_back_and_every_difference_is_a_real_one(machine: str, tmp_path: Path) -> None:
    assert read_recorded(edited(tmp_path, lambda data: data, machine=machine)).machine == machine
    for differing in load_recorded(machine).cases:
        for key in differing.differs:
            path = edited(tmp_path, lambda data: case(data, differing.id)["differs"].pop(key), machine=machine)  # noqa: B023
            assert f"{key} " in (said := refusal(path))
            assert "is asked" in said


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": NaN}', '{"schema": 1, "schema": 2}'])
def test_what_is_no_case_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text, encoding="utf-8")
    assert str(path) in refusal(path)


def test_every_figure_is_asked_for_somewhere() -> None:
    assert {case.figure for machine in recorded_machines() for case in load_recorded(machine).cases} == FIGURES.keys()

"""A profile that release 0.1.0 wrote is the machine that it was, whatever its kernels were called then."""

import json
from pathlib import Path
from typing import Any

import pytest

from hwprofiles import load_profile
from hwprofiles.errors import BadFile
from hwprofiles.renames import KERNEL_KEYS, OPERATIONS
from twin.ask.question import Question
from twin.prediction import predict

WRITTEN = Path(__file__).parent / "data" / "profile_0_1_0.json"
"""The H200 as release 0.1.0 had it, cut down to the kernels of one question."""


def old() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(WRITTEN.read_text(encoding="utf-8"))
    return loaded


def written(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_its_kernels_are_found_under_todays_names_and_are_what_they_were() -> None:
    then, today = old()["kernels"], load_profile(str(WRITTEN)).kernels
    assert set(then) - set(today) == {"expand/twin/int4_per_token_head", "merge/twin/fp16"}
    assert set(today) - set(then) == {"dequantise/twin/int4_per_token_head", "combine/twin/fp16"}
    combined = today["attend_dense/twin/bf16"].combine
    assert combined is not None
    assert combined.value == then["attend_dense/twin/bf16"]["merging"]["value"]


def test_it_predicts_what_it_predicted(tmp_path: Path) -> None:
    text = WRITTEN.read_text(encoding="utf-8")
    for then, today in OPERATIONS.items():
        text = text.replace(f'"{then}/', f'"{today}/')
    for then, today in KERNEL_KEYS.items():
        text = text.replace(f'"{then}":', f'"{today}":')
    (tmp_path / "today.json").write_text(text, encoding="utf-8")
    asked = {"model": "llama-3.1-8b", "engine": "twin", "layout": "vram", "kv_dtype": "int4_per_token_head"}
    question = Question(ctx_tokens=102_400, **asked)  # type: ignore[arg-type]
    answer = predict(question, load_profile(str(WRITTEN)))
    assert answer == predict(question, load_profile(str(tmp_path / "today.json")))
    assert answer.decode is not None
    assert answer.prefill is not None
    assert answer.decode.seconds.value == pytest.approx(0.004660547873911775, rel=1e-9)
    first_token_s = answer.prefill.seconds.value + answer.decode.seconds.value
    assert first_token_s == pytest.approx(10.50731215644683, rel=1e-9)


def test_an_old_name_in_a_file_that_extends_a_machine_replaces_todays_kernel(tmp_path: Path) -> None:
    kernel = {"latency": old()["kernels"]["expand/twin/int4_per_token_head"]["latency"]}
    own = {"extends": "h200", "kernels": {"expand/twin/q8_0": kernel}}
    found = load_profile(written(tmp_path / "own.json", own)).kernels
    assert found.keys() == load_profile("h200").kernels.keys()
    assert found["dequantise/twin/q8_0"].efficiency is None


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_there_under_both_names_is_refused(tmp_path: Path, order: int) -> None:
    kernels = {f"{name}/a/b": {"latency": None} for name in ("merge", "combine")[::order]}
    with pytest.raises(BadFile, match="merge/a/b and combine/a/b are two names of one kernel"):
        load_profile(written(tmp_path / "twice.json", {"extends": "h200", "kernels": kernels}))
    rates = {"a/b/c": dict.fromkeys(("merging", "combine")[::order])}
    with pytest.raises(BadFile, match="a/b/c: merging and combine are two names of one rate"):
        load_profile(written(tmp_path / "twice.json", {"extends": "h200", "kernels": rates}))

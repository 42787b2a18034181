"""The documents that scripts rely on hold nothing that JSON cannot, and say what was assumed and left to defaults."""

import json
from typing import Any

import pytest

from hwprofiles import load_profile
from twin.assumptions import ASSUMPTIONS
from twin.case import Question
from twin.prediction import predict
from twin.render.as_json import comparison_json, error_json, prediction_json

MACHINE = load_profile("3x-rtx3090")


def document(**asked: Any) -> dict[str, Any]:
    return prediction_json(predict(Question(**{"ctx_tokens": 100_000} | asked), MACHINE))


@pytest.mark.parametrize("layout", ["vram", "offload"])
def test_a_document_survives_json(layout: str) -> None:
    whole = document(layout=layout)
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole


def test_defaults_are_filled_in_where_they_mean_something() -> None:
    offload, vram = document(layout="offload")["question"], document(layout="vram")["question"]
    assert offload["staging_bytes"] == 32 * 1024 * 1024
    assert offload["copies"] == "serial"
    assert offload["kv_dtype"] == vram["kv_dtype"] == "fp16"
    assert vram["staging_bytes"] is None
    assert vram["copies"] is None


def test_assumptions_are_spelled_out() -> None:
    for line in document()["assumptions"]:
        key, _, text = line.partition(": ")
        assert key == "extrapolated" or ASSUMPTIONS[key] == text


def test_every_rate_has_a_value_and_a_source() -> None:
    whole = document()
    assert whole["sources"]
    for source in whole["sources"]:
        assert source["value"]
        assert source["source"] in {"measured", "published", "datasheet", "fitted"}
        assert (source["source"] == "fitted") == bool(source["fitted_on"])


def test_parts_and_their_speed_of_light_go_by_the_same_names() -> None:
    for phase in ("decode", "prefill"):
        told = document()[phase]
        assert told["parts_s"].keys() == told["speed_of_light_s"].keys()
        for part, seconds in told["speed_of_light_s"].items():
            assert seconds <= told["parts_s"][part] * (1 + 1e-9)


def test_the_longest_context_has_an_interval_around_it() -> None:
    whole = document()
    low, high = whole["max_ctx_tokens_90"]["low"], whole["max_ctx_tokens_90"]["high"]
    assert low <= whole["max_ctx_tokens"] <= high


def test_what_does_not_fit_has_no_speed() -> None:
    whole = document(ctx_tokens=1 << 28)
    assert whole["decode"] is None
    assert whole["prefill"] is None
    assert whole["shortage"]
    assert not whole["fits"]


def test_a_comparison_is_a_list_of_predictions() -> None:
    prediction = predict(Question(ctx_tokens=1000), MACHINE)
    whole = comparison_json([prediction, prediction])
    assert whole["predictions"] == [prediction_json(prediction)] * 2


def test_an_error_has_three_keys() -> None:
    assert error_json("BadValue", "wrong", "try") == {"error": {"type": "BadValue", "message": "wrong", "hint": "try"}}

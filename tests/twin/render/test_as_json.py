"""The documents that scripts rely on hold nothing that JSON cannot, and say what was assumed and left to defaults."""

from typing import Any

import pytest

from hwprofiles import load_profile
from twin.ask.question import Question
from twin.assumptions import ASSUMPTIONS
from twin.prediction import predict
from twin.render.as_json import prediction_json

MACHINE = load_profile("3x-rtx3090")


def document(**asked: Any) -> dict[str, Any]:
    return prediction_json(predict(Question(**{"ctx_tokens": 100_000} | asked), MACHINE))


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


def test_the_longest_context_has_an_interval_around_it() -> None:
    whole = document()
    low, high = whole["max_ctx_tokens_90"]["low"], whole["max_ctx_tokens_90"]["high"]
    assert low <= whole["max_ctx_tokens"] <= high


def test_what_an_engine_with_a_block_pool_prints_is_in_the_document() -> None:
    whole = prediction_json(predict(Question(ctx_tokens=4096, model="qwen3.8-27b", kv_dtype="fp8")))
    question, memory = whole["question"], whole["memory"]
    assert question["engine"] == "vllm"
    assert memory["kv_pool_blocks"] == memory["kv_pool_bytes"] // memory["block_bytes"]
    assert memory["max_concurrency"] == pytest.approx(memory["kv_pool_tokens"] / question["max_model_tokens"], rel=1e-4)


def test_speculation_says_what_it_drafts_and_where_its_acceptance_comes_from() -> None:
    asked = Question(ctx_tokens=4096, model="qwen3.8-27b", kv_dtype="fp8", speculation="mtp:3", accepted=2.5)
    told = prediction_json(predict(asked))["question"]["speculation"]
    assert (told["drafter"], told["tokens"], told["accepted"]) == ("mtp", 3, 2.5)
    assert told["accepted_from"] == "given"
    assert document()["question"]["speculation"] is None

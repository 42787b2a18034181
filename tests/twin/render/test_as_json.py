"""The documents that scripts rely on hold nothing that JSON cannot, and say what was assumed and left to defaults."""

from hwprofiles import load_profile
from twin.ask.question import Question
from twin.assumptions import ASSUMPTIONS
from twin.prediction import predict
from twin.render.as_json import prediction_json


def test_every_rate_has_a_value_and_a_source_and_every_assumption_its_text() -> None:
    whole = prediction_json(predict(Question(ctx_tokens=100_000), load_profile("3x-rtx3090")))
    for line in whole["assumptions"]:
        key, _, text = line.partition(": ")
        assert key == "extrapolated" or ASSUMPTIONS[key] == text
    assert whole["sources"]
    for source in whole["sources"]:
        assert source["value"]
        assert source["source"] in {"measured", "published", "datasheet", "fitted"}
        assert (source["source"] == "fitted") == bool(source["fitted_on"])


def test_speculation_says_what_it_drafts_and_where_its_acceptance_comes_from() -> None:
    asked = Question(ctx_tokens=4096, model="qwen3.8-27b", kv_dtype="fp8", speculation="mtp:3", accepted=2.5)
    told = prediction_json(predict(asked))["question"]["speculation"]
    assert (told["drafter"], told["tokens"], told["accepted"], told["accepted_from"]) == ("mtp", 3, 2.5, "given")

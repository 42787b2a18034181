"""Ranks that share layers are quicker than one device, never by more than their number, and slower on a slower link."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.worlds import LAWS, link
from twin.ask.question import Question
from twin.prediction import Prediction, predict

MODELS = ("llama-3.1-8b", "qwen3-32b", "devstral-small-24b")
H200 = load_profile("h200")


def over(*, bytes_per_s: float, latency_s: float) -> HardwareProfile:
    """An H200 whose link to others is that."""
    peer = link(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return replace(H200, gpu=replace(H200.gpu, peer=peer, peer_link="NVLink 4"))


PERFECT = over(bytes_per_s=4e12, latency_s=1e-8)


def seconds(prediction: Prediction) -> tuple[float, float]:
    assert prediction.decode is not None
    assert prediction.prefill is not None
    return prediction.decode.seconds.value, prediction.prefill.seconds.value


questions = st.fixed_dictionaries(
    {"model": st.sampled_from(MODELS), "ctx_tokens": st.integers(1, 4_000), "batch": st.integers(1, 32)}
)


@LAWS
@given(questions, st.sampled_from([2, 4, 8]))
def test_a_perfect_link_leaves_at_most_so_many_times_the_speed(asked: dict[str, Any], tp: int) -> None:
    question = Question(engine="vllm", **asked)
    alone = seconds(predict(question, PERFECT))
    shared = seconds(predict(replace(question, tp=tp), PERFECT))
    for one, many in zip(alone, shared, strict=True):
        assert one / tp < many < one


@LAWS
@given(questions, st.floats(1e10, 1e12), st.floats(1e-7, 1e-3), st.floats(1.01, 100), st.sampled_from([2, 4]))
def test_a_slower_link_is_never_quicker(
    asked: dict[str, Any], bytes_per_s: float, latency_s: float, worse: float, tp: int
) -> None:
    question = Question(engine="vllm", tp=tp, **asked)
    given_link = seconds(predict(question, over(bytes_per_s=bytes_per_s, latency_s=latency_s)))
    for slower in ({"bytes_per_s": bytes_per_s / worse, "latency_s": latency_s},
                   {"bytes_per_s": bytes_per_s, "latency_s": latency_s * worse}):  # fmt: skip
        found = seconds(predict(question, over(**slower)))
        assert all(many >= few * (1 - 1e-9) for few, many in zip(given_link, found, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_and_one_stage_are_no_sharing_at_all(model: str) -> None:
    plain = Question(model=model, engine="vllm", ctx_tokens=5_000, batch=3)
    for said in ({"tp": 1}, {"pp": 1}, {"tp": 1, "pp": 1}, {"split": "row"}, {"split": "layer"}):
        first, second = predict(plain, H200), predict(replace(plain, **said), H200)
        assert seconds(first) == seconds(second)
        assert first.memory.memories == second.memory.memories


def test_what_crosses_between_devices_is_no_cache_traffic() -> None:
    prediction = predict(Question(model="llama-3.1-8b", engine="vllm", ctx_tokens=5_000, tp=2), H200)
    assert prediction.decode is not None
    assert (prediction.decode.link_bytes, prediction.decode.link_write_bytes) == (0, 0)
    assert prediction.decode.busy_s["PEER"] > 0
    assert "A20" in prediction.assumptions

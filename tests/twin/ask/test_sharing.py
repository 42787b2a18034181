"""Options about several devices, and what each engine makes of those that are not given."""

from typing import Any

import pytest

from twin.ask.question import Question
from twin.ask.resolve import machine_of, resolve
from twin.ask.sharing import Sharing, sharing_of
from twin.engines import load_engine
from twin.errors import BadValue, Impossible


def sharing(engine: str, there: int, **asked: Any) -> Sharing:
    return sharing_of(Question(ctx_tokens=1, **asked), load_engine(engine), lambda: there)


@pytest.mark.parametrize(
    ("engine", "there", "asked", "ranks", "devices"),
    [
        ("vllm", 1, {}, 1, 1),
        ("vllm", 4, {}, 4, 4),
        ("vllm", 1, {"gpus": 2}, 2, 2),
        ("vllm", 1, {"tp": 2}, 2, 2),
        ("vllm", 8, {"tp": 2}, 2, 2),
        ("vllm", 8, {"pp": 2}, 4, 8),
        ("vllm", 8, {"tp": 2, "pp": 3}, 2, 6),
        ("vllm", 3, {"split": "layer"}, 1, None),
        ("exllamav3", 3, {}, 1, None),
        ("exllamav3", 4, {"split": "row"}, 4, 4),
        ("exllamav3", 4, {"tp": 2}, 2, 4),
        ("exllamav3", 1, {"tp": 2}, 2, 2),
        ("exllamav3", 4, {"pp": 2}, 1, 2),
        ("twin", 2, {"pp": 2}, 1, 2),
    ],
)
def test_an_engine_shares_as_asked_or_in_its_own_way(
    engine: str, there: int, asked: dict[str, Any], ranks: int, devices: int | None
) -> None:
    assert sharing(engine, there, **asked) == (ranks, devices)


@pytest.mark.parametrize(
    ("engine", "there", "asked", "says"),
    [
        ("twin", 2, {"tp": 2}, "--tp means nothing to twin: it does not split by row"),
        ("twin", 2, {"split": "row"}, "--split means nothing to twin"),
        ("vllm", 4, {"split": "layer", "tp": 2}, "--tp means nothing under --split layer"),
        ("vllm", 4, {"split": "row", "pp": 2}, "--pp means nothing under --split row"),
        ("vllm", 3, {"tp": 4}, "4 ranks need 4 devices, there are 3"),
        ("vllm", 1, {"gpus": 4, "tp": 4, "pp": 2}, "2 stages of 4 ranks need 8 devices, there are 4"),
        ("vllm", 2, {"pp": 3}, "3 stages need 3 devices, there are 2"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(engine: str, there: int, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(Impossible, match=says):
        sharing(engine, there, **asked)


@pytest.mark.parametrize("asked", [{"tp": 0}, {"pp": 0}, {"tp": 5000}, {"split": "column"}])
def test_numbers_and_words_are_checked(asked: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        resolve(Question(ctx_tokens=1, **asked))


def test_the_machine_has_the_devices_that_are_shared_and_the_model_says_why_it_cannot_be() -> None:
    asked = {"model": "qwen3.8-27b", "engine": "vllm", "hw": "3x-rtx3090"}
    case = resolve(Question(ctx_tokens=1, tp=2, **asked))
    assert (machine_of(case, None).gpu_count, machine_of(case, None).name) == (2, "2x-rtx3090")
    with pytest.raises(Impossible, match="3 ranks do not share 4 KV heads") as refused:
        resolve(Question(ctx_tokens=1, **asked))
    assert "--pp" in refused.value.hint
    with pytest.raises(Impossible, match="keeps attention that selects blocks on one device"):
        resolve(Question(ctx_tokens=1, tp=2))

"""Figures of many requests at once: one request alone is a prediction's prefill and steps; more share the pool."""

from typing import Any

import pytest

from calibrate.estimates import Asked, Estimate, Load, NoAnswer, answer
from calibrate.figures import FIGURES
from hwprofiles import load_profile
from twin.ask.question import Question
from twin.units import MS

PROFILE = load_profile("rtx3090")
SERVED = ("total_time", "throughput", "inter_token", "residents")
TIMED = SERVED[:3]
MODEL: dict[str, Any] = {"model": "qwen3.8-27b-int8-mlp", "kv_dtype": "fp8"}
BLOCK_BYTES = 800 * 2048 * 16
"""A block of 800 tokens in 16 layers, 2,048 bytes each."""

BLOCKS = 2 + 3
"""Of a request of 801 to 1,600 tokens: two of attention, three of recurrent state."""


def load(output: int = 11, *, prompt: int = 1000, requests: int = 1) -> Load:
    return Load(requests=requests, prompt_tokens=prompt, output_tokens=output)


def asked(workload: Load | None, *, intervals: bool = True, **fields: Any) -> Asked:
    question = Question(ctx_tokens=1000, **(MODEL | fields))
    return Asked(question=question, against=None, profile=PROFILE, workload=workload, intervals=intervals)


def figure(name: str, workload: Load | None, *, intervals: bool = True, **fields: Any) -> Estimate:
    return FIGURES[name].estimate(asked(workload, intervals=intervals, **fields))


def steps_s(first: int, count: int, **fields: Any) -> list[float]:
    """Seconds of decode steps from `first` cached tokens on."""
    questions = [Question(ctx_tokens=ctx, **(MODEL | fields)) for ctx in range(first, first + count)]
    return [answer(question, PROFILE).decode.seconds.value for question in questions]


def test_one_token_takes_the_time_to_the_first() -> None:
    ttft = answer(Question(ctx_tokens=1000, **MODEL), PROFILE).ttft_s
    assert figure("total_time", load(1)).value == pytest.approx(ttft.value, rel=1e-9)


def test_every_further_token_takes_a_decode_step() -> None:
    first, all_ = (figure("total_time", load(output)).value for output in (1, 11))
    assert all_ - first == pytest.approx(sum(steps_s(1000, 10)), rel=1e-9)
    assert figure("throughput", load(11)).value == pytest.approx(11 / all_)


def test_the_time_between_tokens_is_a_decode_step() -> None:
    found = figure("inter_token", load(11)).value
    assert found == pytest.approx(steps_s(1005, 1)[0] / MS, rel=0.005)  # a quantile is within half a per cent


def test_a_step_that_yields_several_tokens_delivers_them_together() -> None:
    drafted = {"model": "qwen3.8-27b-fast", "speculation": "mtp:3", "accepted": 2.0}
    whole = figure("total_time", load(21), **drafted).value - figure("total_time", load(1), **drafted).value
    assert whole == pytest.approx(10 * steps_s(1010, 1, **drafted)[0], rel=0.01)
    assert figure("inter_token", load(21), **drafted).value == pytest.approx(whole / 10 / MS, rel=0.01)


@pytest.mark.parametrize(("blocks", "requests", "at_once"), [(2, 4, 2), (3, 4, 3), (9, 4, 4), (9, 1, 1)])
def test_as_many_stay_as_their_blocks_leave_room(blocks: int, requests: int, at_once: int) -> None:
    found = figure("residents", load(100, requests=requests), pool_bytes=(1 + blocks * BLOCKS) * BLOCK_BYTES)
    assert found.value == found.low == found.high == at_once
    assert found.naive is None


def test_a_block_less_is_a_request_less() -> None:
    pool_bytes = (1 + 3 * BLOCKS) * BLOCK_BYTES
    assert figure("residents", load(100, requests=4), pool_bytes=pool_bytes - 1).value == 2


def test_no_more_stay_than_the_engine_takes_sequences() -> None:
    for slots in (1, 3):
        assert figure("residents", load(100, requests=8), max_sequences=slots).value == slots


def test_what_runs_beside_others_is_slower_and_all_of_it_is_faster() -> None:
    alone, together = ({"max_sequences": slots} for slots in (1, 8))
    many = load(100, requests=8)
    assert figure("throughput", many, **together).value > 2 * figure("throughput", many, **alone).value
    assert figure("inter_token", many, **together).value > figure("inter_token", many, **alone).value
    assert figure("total_time", many, **alone).value == pytest.approx(8 * figure("total_time", load(100)).value)


@pytest.mark.parametrize("name", TIMED)
def test_a_time_has_an_interval_only_where_one_is_wanted(name: str) -> None:
    found = figure(name, load(11, requests=2))
    assert found.low < found.value < found.high
    plain = figure(name, load(11, requests=2), intervals=False)
    assert plain.low == plain.value == plain.high == found.value


def test_a_longer_time_is_a_lower_throughput() -> None:
    total, rate = (figure(name, load(11, requests=2)) for name in ("total_time", "throughput"))
    assert total.low * rate.high == pytest.approx(total.high * rate.low) == pytest.approx(22)


def test_the_workload_says_how_long_prompts_are_and_the_question_does_not() -> None:
    question = Question(ctx_tokens=77, **MODEL)
    other = Asked(question=question, against=None, profile=PROFILE, workload=load(), intervals=False)
    assert FIGURES["total_time"].estimate(other) == figure("total_time", load(), intervals=False)


@pytest.mark.parametrize("name", SERVED)
def test_a_figure_of_many_requests_needs_a_workload(name: str) -> None:
    with pytest.raises(NoAnswer, match="needs a workload"):
        figure(name, None)


@pytest.mark.parametrize("name", SERVED)
def test_a_request_that_can_never_run_is_no_answer(name: str) -> None:
    with pytest.raises(NoAnswer, match=rf"needs {BLOCKS} blocks, the pool has {BLOCKS - 1}"):
        figure(name, load(100), pool_bytes=BLOCKS * BLOCK_BYTES)
    with pytest.raises(NoAnswer, match=r"1,100|1100"):
        figure(name, load(100), max_model_tokens=1050)


def test_a_single_token_has_no_time_between_tokens() -> None:
    with pytest.raises(NoAnswer, match="one token"):
        figure("inter_token", load(1))

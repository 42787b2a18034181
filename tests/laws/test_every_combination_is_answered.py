"""Every shipped model on every shipped machine under every engine: answered whole, or told in one line why not."""

import random
from itertools import product

import pytest

from hwprofiles import profile_names
from tests.laws.asked import phases
from twin.ask.question import Question
from twin.engines import engine_names
from twin.errors import Impossible
from twin.models import model_names
from twin.prediction import Prediction, predict

SAMPLED = 600
PARTS = 6
COMBINATIONS = sorted(product(model_names(), profile_names(), engine_names()))
SAMPLE = random.Random(0).sample(COMBINATIONS, SAMPLED)  # noqa: S311 - the same ones on every run


ANSWERED, FULL, REFUSED = "answered", "does not fit", "impossible"


def is_whole(prediction: Prediction) -> bool:
    """Whether both phases are there, with intervals around them and no step faster than its floor."""
    for phase in phases(prediction):
        value, low, high = phase.seconds
        if not 0 < phase.floor_s <= low <= value <= high or (prediction.rungs and low == high):
            return False
    return prediction.ttft_s is not None and not prediction.not_predicted


def outcome(model: str, hw: str, engine: str) -> str:
    """One of the three, or what is wrong."""
    try:
        prediction = predict(Question(ctx_tokens=2048, model=model, hw=hw, engine=engine))
    except Impossible as wrong:
        return REFUSED if wrong.message and "\n" not in wrong.message else f"no line: {wrong.message}"
    if not prediction.fits:
        return FULL
    return ANSWERED if is_whole(prediction) else f"not whole: {prediction.not_predicted}"


@pytest.mark.parametrize("part", range(PARTS))
def test_it_is_answered_whole_or_does_not_fit_or_is_impossible_in_one_line(part: int) -> None:
    found = {combination: outcome(*combination) for combination in SAMPLE[part::PARTS]}
    assert {each: told for each, told in found.items() if told not in (ANSWERED, FULL, REFUSED)} == {}
    assert set(found.values()) == {ANSWERED, FULL, REFUSED}

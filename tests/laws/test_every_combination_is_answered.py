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


def is_whole(prediction: Prediction) -> bool:
    """Whether both phases are there, with intervals around them and no step faster than its floor."""
    for phase in phases(prediction):
        value, low, high = phase.seconds
        if not 0 < phase.floor_s <= low <= value <= high or (prediction.rungs and low == high):
            return False
    return prediction.ttft_s is not None and not prediction.not_predicted


@pytest.mark.parametrize("part", range(PARTS))
def test_it_is_answered_whole_or_does_not_fit_or_is_impossible_in_one_line(part: int) -> None:
    ways: set[str] = set()
    for model, hw, engine in SAMPLE[part::PARTS]:
        try:
            prediction = predict(Question(ctx_tokens=2048, model=model, hw=hw, engine=engine))
        except Impossible as wrong:
            assert wrong.message, (model, hw, engine)
            assert "\n" not in wrong.message, (model, hw, engine)
            ways.add("impossible")
            continue
        assert not prediction.fits or is_whole(prediction), (model, hw, engine)
        ways.add("answered" if prediction.fits else "does not fit")
    assert ways == {"answered", "does not fit", "impossible"}

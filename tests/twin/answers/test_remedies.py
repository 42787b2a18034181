"""A way out is one that helps: every tip, when it is followed, makes the question fit."""

from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.laws.drawn import machines, questions
from tests.worlds import LAWS
from twin.answers.remedies import remedies
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.memory.plan import plan_memory
from twin.prediction import predict
from twin.units import GIB, parse_bytes

BLOG = load_profile("3x-rtx3090")
ANOTHER_MACHINE = "a machine with more memory"


def followed(question: Question, tip: str) -> Question:
    words = tip.split()
    changes = dict(zip(words[::2], words[1::2], strict=True))
    if "--ctx" in changes:
        return replace(question, ctx_tokens=int(changes["--ctx"]))
    if "--pool" in changes:
        return replace(question, pool_bytes=parse_bytes(changes["--pool"]))
    if "--max-seqs" in changes:
        return replace(question, max_sequences=int(changes["--max-seqs"]))
    if "--util" in changes:
        return replace(question, utilisation=float(changes["--util"]))
    return replace(
        question, **{option.removeprefix("--").replace("-", "_"): value for option, value in changes.items()}
    )


def tips_for(question: Question, machine: HardwareProfile = BLOG) -> list[str]:
    prediction = predict(question, machine)
    assert not prediction.fits
    return remedies(prediction)


@pytest.mark.parametrize(
    ("asked", "others"),
    [
        ({"ctx_tokens": 1 << 20, "layout": "vram"}, ["--layout offload"]),
        ({"ctx_tokens": 4 << 20, "ngram": "ram"}, ["--ngram disk"]),
        ({"ctx_tokens": 4 << 20, "layout": "vram", "ngram": "ram"}, ["--layout offload --ngram disk"]),
        ({"ctx_tokens": 8 << 20, "ngram": "ram"}, []),
    ],
)
def test_beside_the_longest_context_the_fewest_changes_that_fit_are_suggested(asked: Any, others: list[str]) -> None:
    context, *found = tips_for(Question(**asked))
    assert context.startswith("--ctx ")
    assert found == others
    for layout in ("vram", "offload"):
        assert tips_for(Question(ctx_tokens=1, layout=layout), load_profile("rtx3090")) == [ANOTHER_MACHINE]


@pytest.mark.parametrize("ctx_tokens", [1024, 80_000])
@pytest.mark.parametrize("pool_bytes", [GIB, 500 * GIB])
def test_of_a_given_pool_the_largest_that_the_device_holds_is_suggested(ctx_tokens: int, pool_bytes: int) -> None:
    machine = load_profile("rtx3090")
    question = Question(ctx_tokens=ctx_tokens, model="qwen3.8-27b", pool_bytes=pool_bytes)
    if predict(question, machine).fits:
        return
    (tip,) = (tip for tip in tips_for(question, machine) if tip.startswith("--pool "))
    pool_bytes = parse_bytes(tip.removeprefix("--pool "))
    assert predict(followed(question, tip), machine).fits
    assert not predict(replace(question, pool_bytes=pool_bytes + GIB), machine).fits


@LAWS
@given(questions(), machines())
def test_every_tip_helps(question: Question, machine: HardwareProfile) -> None:
    if plan_memory(*settled(question, machine)).fits:
        return
    tips = tips_for(question, machine)
    assert tips
    for tip in tips:
        if tip != ANOTHER_MACHINE:
            assert plan_memory(*settled(followed(question, tip), machine)).fits, tip


@pytest.mark.parametrize(
    ("machine", "asked", "tip"),
    [
        ("rtx3090", {"model": "qwen3.8-27b", "ctx_tokens": 32_768, "kv_dtype": "kvarn_k4v2_g128"}, "--max-seqs 64"),
        ("gb10", {"model": "llama-3.1-8b", "ctx_tokens": 8192}, "--util 0.9"),
    ],
)
def test_an_engines_own_defaults_give_way_where_they_leave_no_room(machine: str, asked: Any, tip: str) -> None:
    """Of tiles that wait 256 sequences hold 4 GiB; the system keeps more of one memory than 0.92 leaves."""
    question, profile = Question(**asked), load_profile(machine)
    assert tip in tips_for(question, profile)
    assert predict(followed(question, tip), profile).fits

"""Drafts and what they yield: ranges, published acceptances and the nearest of them, the mixture of kinds of step."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from calibrate.published.cases import Row, read_published
from tests.worlds import LAWS
from twin.errors import BadValue, Impossible
from twin.formats import format_names
from twin.models import load_model, model_names
from twin.models.spec import Drafter
from twin.models.speculation import ACCEPTANCE, Accepted, Speculation, VerifyStep, published_acceptance, speculation_of

MODEL = load_model("qwen3.8-27b-fast")
MTP, DFLASH = MODEL.drafters
ROWS = msgspec.json.decode((ACCEPTANCE / "qwen3.8-27b.json").read_bytes(), type=list[Accepted])


def asked(text: str, **question: Any) -> Speculation:
    plain: dict[str, Any] = {"accepted": None, "task": None, "kv_dtype": "fp8", "ctx_tokens": 100_000}
    return speculation_of(MODEL, text, **(plain | question))


def drafting(drafter: Drafter, tokens: int, accepted: float) -> Speculation:
    return Speculation(drafter=drafter, tokens=tokens, accepted=accepted, source="given")


@pytest.mark.parametrize(
    ("text", "name", "tokens"),
    [("mtp:3", "mtp", 3), ("mtp", "mtp", 3), ("dflash2", "dflash2", 7), ("DFlash-2:15", "dflash2", 15)],
)
def test_a_speculation_is_a_drafter_and_a_number_of_tokens_or_the_drafters_own(
    text: str, name: str, tokens: int
) -> None:
    found = asked(text, accepted=1.0)
    assert (found.drafter.name, found.tokens, found.accepted, found.source) == (name, tokens, 1.0, "given")


@pytest.mark.parametrize(("text", "most"), [("mtp:1", 2), ("mtp:3", 4), ("dflash2:7", 8), ("dflash2:20", 21)])
def test_a_step_yields_the_bonus_token_and_at_most_every_drafted_one(text: str, most: int) -> None:
    assert [asked(text, accepted=accepted).accepted for accepted in (1.0, float(most))] == [1.0, most]
    for accepted, shown in ((0.99, "0.99"), (most + 0.01, f"{most}.01"), (-2.0, "-2")):
        says = f"accepted tokens {shown} is outside the range of 1 to {most} (k + 1) a step"
        with pytest.raises(BadValue, match=re.escape(says)):
            asked(text, accepted=accepted)


@pytest.mark.parametrize("text", ["mtp:", "mtp:-3", "mtp:3.0", "mtp: 3", "mtp:+3", "mtp:3:3", "mtp:12345"])
def test_what_is_no_drafter_and_number_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match=re.escape(f"{text!r} is not a speculation")) as refused:
        asked(text, accepted=1.0)
    assert refused.value.hint == "write mtp:3 or dflash2:15"


@pytest.mark.parametrize("text", ["eagle:3", "", ":3", "mtp3:3", "dflash:7", "dflash-3:7"])
def test_a_drafter_that_a_model_has_not_is_refused_with_those_that_it_has(text: str) -> None:
    with pytest.raises(BadValue, match=f"no drafter {text.partition(':')[0]!r}") as refused:
        asked(text, accepted=1.0)
    assert refused.value.hint == "it has dflash2, mtp"


def test_more_drafts_than_a_drafter_has_and_a_task_beside_an_acceptance_are_refused() -> None:
    with pytest.raises(BadValue, match="mtp proposes 1 to 7 tokens, not 8"):
        asked("mtp:8", accepted=1.0)
    with pytest.raises(Impossible, match="an acceptance and a task were given; "):
        asked("mtp:3", accepted=1.0, task="all")


def test_an_acceptance_published_for_longer_drafts_is_not_stretched_to_short_ones() -> None:
    """A verbatim copy yields 14.19 of 16, which no step of 8 can."""
    assert asked("dflash2:15", task="verbatim").accepted == 14.19
    with pytest.raises(BadValue, match=re.escape("accepted tokens 14.19 is outside the range of 1 to 8")):
        asked("dflash2:7", task="verbatim")


def test_without_anything_published_an_acceptance_must_be_given() -> None:
    unknown = replace(MODEL, family="", name="nobody's")
    question: dict[str, Any] = {"task": None, "kv_dtype": "fp8", "ctx_tokens": 1}
    with pytest.raises(BadValue, match="no acceptance of mtp on task 'all' is published for nobody's") as refused:
        speculation_of(unknown, "mtp:3", accepted=None, **question)
    assert refused.value.hint == "give --accept, or one of the tasks (none)"
    assert speculation_of(unknown, "mtp:3", accepted=2.5, **question).accepted == 2.5


@pytest.mark.parametrize(
    ("text", "question", "accepted"),
    [
        ("mtp:3", {}, 2.95),
        ("dflash2:15", {"task": "verbatim", "kv_dtype": "int8_per_token_head"}, 14.19),
        ("dflash2:15", {"task": "verbatim", "kv_dtype": "bf16", "ctx_tokens": 50_000}, 15.0),
        ("mtp:3", {"task": "summarize+answer"}, 2.56),
        ("mtp:3", {"task": "Summarize+Answer", "kv_dtype": "kvarn_k4v2_g128"}, 2.38),
        ("mtp:2", {"task": "chat"}, 2.58),
    ],
)
def test_the_nearest_published_acceptance_is_taken(text: str, question: dict[str, Any], accepted: float) -> None:
    assert asked(text, **question).accepted == accepted


@pytest.mark.parametrize(
    ("asked_for", "row"),
    [
        (("bf16", 1), ("bf16", 25_000)),
        (("bf16", 37_499), ("bf16", 25_000)),
        (("bf16", 37_501), ("bf16", 50_000)),
        (("int8_per_token_head", 1), ("int8_per_token_head", 112_655)),
        (("fp8", 60_000), ("bf16", 50_000)),
        (("fp8", 110_000), ("int8_per_token_head", 112_655)),
    ],
)
def test_the_same_format_counts_before_the_nearest_context(asked_for: tuple[str, int], row: tuple[str, int]) -> None:
    fmt, ctx_tokens = asked_for
    found = published_acceptance("qwen3.8-27b", "dflash2", 15, kv_dtype=fmt, ctx_tokens=ctx_tokens, task="verbatim")
    assert (found.kv_dtype, found.ctx_tokens) == row


PAPER = replace(DFLASH, block_tokens=8, block_accepts=2.0, lookup_accepts=12.0)


@pytest.mark.parametrize(
    ("accepted", "shares"),
    [(1.0, {8: 1.0}), (2.0, {8: 1.0}), (4.0, {8: 0.8, 16: 0.2}), (7.0, {8: 0.5, 16: 0.5}), (12.0, {16: 1.0})],
)
def test_a_block_drafter_that_looks_drafts_up_mixes_two_kinds_of_step(
    accepted: float, shares: dict[int, float]
) -> None:
    """Its own block of 8 yields 2, a looked-up draft of 16 yields 12: the mean says how often each comes."""
    steps = drafting(PAPER, 15, accepted).steps
    assert {step.query_tokens: step.share for step in steps} == pytest.approx(shares)


@LAWS
@given(st.integers(1, 7), st.floats(1, 8))
def test_a_sequential_drafter_always_verifies_all_that_it_drafts(tokens: int, accepted: float) -> None:
    found = drafting(MTP, tokens, accepted)
    assert (found.steps, found.passes) == ((VerifyStep(share=1.0, query_tokens=tokens + 1),), tokens)


ACCEPTS = st.floats(1, 21)


@LAWS
@given(st.sampled_from(MODEL.drafters), st.integers(1, 20), ACCEPTS)
def test_shares_of_the_kinds_of_step_add_up_to_one(drafter: Drafter, tokens: int, accepted: float) -> None:
    steps = drafting(drafter, min(tokens, drafter.max_tokens), accepted).steps
    assert sum(step.share for step in steps) == pytest.approx(1.0)
    assert all(0 < step.share <= 1 for step in steps)
    assert len({step.query_tokens for step in steps}) == len(steps)


@LAWS
@given(st.integers(8, 20), ACCEPTS, ACCEPTS)
def test_a_higher_acceptance_never_has_fewer_long_steps(tokens: int, one: float, other: float) -> None:
    def long_share(accepted: float) -> float:
        steps = drafting(DFLASH, tokens, accepted).steps
        return sum(step.share for step in steps if step.query_tokens == tokens + 1)

    low, high = sorted((one, other))
    assert long_share(low) <= long_share(high)
    assert long_share(min(low, DFLASH.block_accepts)) == 0
    assert long_share(max(high, DFLASH.lookup_accepts)) == 1


@LAWS
@given(st.integers(1, 7), st.sampled_from(format_names()), st.integers(1, 2**31 - 1), st.sampled_from(ROWS))
def test_a_published_acceptance_is_always_of_the_task_and_the_drafter_asked_for(
    tokens: int, fmt: str, ctx_tokens: int, row: Accepted
) -> None:
    found = published_acceptance("qwen3.8-27b", row.drafter, tokens, kv_dtype=fmt, ctx_tokens=ctx_tokens, task=row.task)
    assert (found.drafter, found.task) == (row.drafter, row.task)
    same = published_acceptance(
        "qwen3.8-27b", row.drafter, row.tokens, kv_dtype=row.kv_dtype, ctx_tokens=row.ctx_tokens, task=row.task
    )
    assert same == row


PUBLISHED = [row for row in read_published("published_rtx3090.json").rows if row.metric == "accepted_tokens_per_step"]


def counterpart(row: Row) -> Accepted:
    """The row of the data file that says what `row` does."""
    said = row.conditions
    speculation = str(said.get("speculation", "mtp3-" + str(said.get("layout"))))
    drafter, tokens, fmt = re.fullmatch(r"(dflash2|mtp)-?k?(\d+)(?:-(\w+))?", speculation).groups()  # type: ignore[union-attr]
    fmt = {"int8": "int8_per_token_head", None: "bf16"}.get(fmt, fmt)
    task = said.get("task", "summarize+answer")
    key = (drafter, int(tokens), fmt, said["ctx"], task)
    (found,) = [own for own in ROWS if (own.drafter, own.tokens, own.kv_dtype, own.ctx_tokens, own.task) == key]
    return found


@pytest.mark.parametrize("row", PUBLISHED, ids=[row.id for row in PUBLISHED])
def test_every_published_acceptance_is_carried_as_it_was_published(row: Row) -> None:
    assert counterpart(row).accepted == row.value


def test_a_carried_acceptance_without_a_published_row_is_one_of_short_chats_by_position() -> None:
    """Sums of what is accepted by position: 1 + 0.74 + 0.50 + 0.34 (+ 0.24), and greedily."""
    published = [counterpart(row) for row in PUBLISHED]
    others = [own for own in ROWS if own not in published]
    by_position = {"chat": (0.74, 0.50, 0.34, 0.24), "chat-greedy": (0.77, 0.55, 0.40, 0.30)}
    assert {(own.drafter, own.kv_dtype, own.ctx_tokens) for own in others} == {("mtp", "bf16", 512)}
    assert {(own.task, own.tokens) for own in others} == {(task, k) for task in by_position for k in (3, 4)}
    for own in others:
        assert own.accepted == pytest.approx(1 + sum(by_position[own.task][: own.tokens]))


@pytest.mark.parametrize("path", sorted(ACCEPTANCE.glob("*.json")), ids=lambda path: path.stem)
def test_acceptances_name_a_model_a_drafter_and_a_format_that_exist(path: Path) -> None:
    specs = [load_model(name) for name in model_names() if path.stem in (name, load_model(name).family)]
    assert specs
    drafters = {drafter.name: drafter for spec in specs for drafter in spec.drafters}
    rows = msgspec.json.decode(path.read_bytes(), type=list[Accepted])
    keys = [(row.drafter, row.tokens, row.kv_dtype, row.ctx_tokens, row.task) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        assert row.tokens <= drafters[row.drafter].max_tokens
        assert row.accepted <= row.tokens + 1
        assert row.kv_dtype in format_names()
        assert row.source

"""Carried acceptances against what was published, and that they speak of drafters and formats that exist."""

import re
from pathlib import Path

import msgspec
import pytest

from calibrate.published.cases import Row, read_published
from twin.formats import format_names
from twin.models import load_model, model_names
from twin.models.speculation import ACCEPTANCE, Accepted

ROWS = msgspec.json.decode((ACCEPTANCE / "qwen3.8-27b.json").read_bytes(), type=list[Accepted])
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

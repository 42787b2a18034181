"""Every answer is the one that is kept, to 1e-9; where it is meant to move, `python -m tests.golden.regenerate`."""

import click
import pytest

import cli
from hwprofiles import profile_names
from tests.golden.answers import FOLDER, read
from tests.golden.moves import compared, report
from tests.golden.questions import homes, published_tasks, questions, rated_formats
from tests.golden.regenerate import asked_again
from twin.engines import engine_names
from twin.formats import format_names, is_exl3
from twin.layouts import layout_names
from twin.models import load_model, model_names

MOST = 20
"""Rows of a failure's table."""
FILES = tuple(questions())
ASKED = [words for name in FILES for words in questions()[name]]
ALONE = {word for words in ASKED for word in words}

ANSWERING = ("predict", "compare", "simulate", "profiles", "models", "layouts", "formats")
NOT_ASKED = {"as_json", "output", "save", "explain", "trace", "trace_phase", "requests_out"}
"""Options that say where an answer goes and how it looks, not what it is."""


@pytest.mark.parametrize("name", FILES)
def test_answers_are_those_that_are_kept(name: str) -> None:
    if found := compared(read(name), asked_again(name)):
        meant = "meant so? python -m tests.golden.regenerate, and quote its table"
        pytest.fail(f"{name}.json: {report(found, most=MOST)}\n{meant}", pytrace=False)


def test_every_file_belongs_to_questions_and_no_question_is_in_two() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FILES)
    assert len(ASKED) == len(set(ASKED))


@pytest.mark.parametrize("command", ANSWERING)
def test_every_option_that_moves_numbers_is_asked_with_all_its_choices(command: str) -> None:
    asked = {word for words in ASKED if words[0] == command for word in words}
    for option in cli.twin.commands[command].params:
        if isinstance(option, click.Option) and option.name not in NOT_ASKED:
            assert asked & {*option.opts, *option.secondary_opts}, option.name
            assert set(getattr(option.type, "choices", ())) <= ALONE, option.name


def test_every_shipped_name_rated_format_and_published_acceptance_is_asked_where_it_is_known() -> None:
    plain = {fmt for fmt in format_names() if not is_exl3(fmt)}
    assert {*model_names(), *profile_names(), *engine_names(), *layout_names(), *plain} <= ALONE
    asked = [set(words) for words in ASKED if words[0] == "predict"]
    for place in homes():
        for fmt in rated_formats(place):
            assert any({*place.words, "--kv-dtype", fmt} <= words for words in asked), (place, fmt)
    for model in model_names():
        if load_model(model).drafters:
            assert all(any(set(task) <= words for words in asked) for task in published_tasks(model))

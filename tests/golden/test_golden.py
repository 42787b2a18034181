"""Every answer is the one that is kept, to 1e-9; where it is meant to move, `python -m tests.golden.regenerate`."""

from collections.abc import Iterator

import click
import pytest

import cli
from hwprofiles import profile_names
from tests.golden.moves import compared, report
from tests.golden.places import homes, rated_formats
from tests.golden.questions import questions
from tests.golden.regenerate import asked_again
from tests.golden.store import FOLDER, read
from tests.golden.values import published_tasks
from twin.engines import engine_names
from twin.formats import format_names, is_exl3
from twin.layouts import layout_names
from twin.models import load_model, model_names

MOST = 20
"""Rows of a failure's table."""
FILES = tuple(questions())

ANSWERING = ("predict", "compare", "simulate", "profiles", "models", "layouts", "formats")
NOT_ASKED = {"as_json", "output", "explain", "trace", "trace_phase", "requests_out"}
"""Options that say where an answer goes and how it looks, not what it is."""


@pytest.mark.parametrize("name", FILES)
def test_answers_are_those_that_are_kept(name: str) -> None:
    found = compared(read(name), asked_again(name))
    if found:
        text = (
            f"{name}.json: {report(found, most=MOST)}\nmeant so? python -m tests.golden.regenerate, and quote its table"
        )
        pytest.fail(text, pytrace=False)


def test_every_file_belongs_to_questions_and_no_question_is_in_two() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FILES)
    asked = [words for name in FILES for words in questions()[name]]
    assert len(asked) == len(set(asked))


def words_of(command: str) -> set[str]:
    return {word for words in all_questions() if words[0] == command for word in words}


def all_questions() -> list[tuple[str, ...]]:
    return [words for name in FILES for words in questions()[name]]


def asked_options() -> Iterator[tuple[str, click.Parameter]]:
    for name in ANSWERING:
        for parameter in cli.twin.commands[name].params:
            if isinstance(parameter, click.Option) and parameter.name not in NOT_ASKED:
                yield name, parameter


@pytest.mark.parametrize(
    ("command", "option"), [pytest.param(*pair, id=f"{pair[0]} {pair[1].opts[0]}") for pair in asked_options()]
)
def test_every_option_that_moves_numbers_is_asked_with_all_its_choices(command: str, option: click.Option) -> None:
    asked = words_of(command)
    assert asked & {*option.opts, *option.secondary_opts}
    if isinstance(option.type, click.Choice):
        alone = {word for words in all_questions() for word in words}
        assert set(option.type.choices) <= alone


def test_every_shipped_name_is_asked_about() -> None:
    asked = {word for words in all_questions() for word in words}
    plain = {fmt for fmt in format_names() if not is_exl3(fmt)}
    names = {*model_names(), *profile_names(), *engine_names(), *layout_names(), *plain}
    assert names <= asked


def test_every_rated_format_and_published_acceptance_is_asked_where_it_is_known() -> None:
    asked = [set(words) for words in all_questions() if words[0] == "predict"]
    for place in homes():
        for fmt in rated_formats(place):
            assert any({*place.words, "--kv-dtype", fmt} <= words for words in asked), (place, fmt)
    for model in model_names():
        if load_model(model).drafters:
            assert all(any(set(task) <= words for words in asked) for task in published_tasks(model))

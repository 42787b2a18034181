"""Prompts as text become entries: drawn arrivals, estimated tokens; a wrong one is named by its line."""

import io
import itertools
import json
from contextlib import suppress
from io import BufferedReader
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving.entries import Entry, Wrong
from twin.serving.prompts import Prompts, objects_of_lines, objects_of_list, prompts_of

VLLM = {"prompt": "What is it?", "output_tokens": 10}
OPENAI = {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hello world!"}], "max_tokens": 9}}
SHAREGPT = {"id": "a_0", "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A model."}]}


def prompts(*documents: Any, output_tokens: int | None = None, chars_per_token: float = 4.0) -> Prompts:
    layout = prompts_of(documents[0])
    assert layout is not None
    given = {"chars_per_token": chars_per_token, "output_tokens": output_tokens}
    return Prompts(layout, enumerate(documents, 1), itertools.count(0.5), **given)  # type: ignore[arg-type]


def read(*documents: Any, **asked: Any) -> list[Entry]:
    return list(prompts(*documents, **asked).entries())


def refusal(*documents: Any) -> str:
    made = prompts(*documents)
    with pytest.raises(Wrong) as refused:
        list(made.entries())
    return f"{made.number}: {refused.value}"


def batch(**body: Any) -> dict[str, Any]:
    return OPENAI | {"body": OPENAI["body"] | body}  # type: ignore[operator]


def test_tokens_are_characters_over_characters_a_token_and_at_least_one() -> None:
    first, second = read(VLLM, VLLM | {"prompt": "?"})
    assert (first.prompt_tokens, first.output_tokens, first.arrival, first.line) == (3, 10, 0.5, 1)
    assert (second.prompt_tokens, second.arrival, second.id, second.in_seconds) == (1, 1.5, 1, True)
    assert read(VLLM, chars_per_token=2.0)[0].prompt_tokens == 6


def test_what_says_nothing_of_its_output_takes_what_is_asked_for() -> None:
    bare = {"prompt": "What is it?"}
    assert [each.output_tokens for each in read(VLLM, bare, output_tokens=7)] == [10, 7]
    assert refusal(VLLM, bare) == "2: has no output_tokens"
    assert refusal(batch(max_tokens=None)) == "1: has no body.max_completion_tokens or body.max_tokens"


def test_all_messages_and_parts_of_a_chat_count_and_so_do_tokens_in_place_of_text() -> None:
    parts = [{"type": "text", "text": "four"}, {"type": "text", "text": "more"}]
    chat = [{"role": "system", "content": "Be so."}, {"role": "assistant", "content": None}, {"content": parts}]
    assert read(batch(messages=chat))[0].prompt_tokens == round((6 + 8) / 4)
    assert read(batch(max_completion_tokens=20))[0].output_tokens == 20
    body = {"prompt": [1, 2, 3], "max_tokens": 5}
    (entry,) = read(OPENAI | {"body": body})
    assert (entry.id, entry.prompt_tokens) == ("a", 3)


def test_conversations_without_question_and_reply_are_left_out_and_counted() -> None:
    empty = SHAREGPT | {"conversations": [{"value": ""}, {"value": "A model."}]}
    made = prompts(SHAREGPT, SHAREGPT | {"conversations": []}, empty, SHAREGPT)
    assert [(each.prompt_tokens, each.output_tokens, each.arrival) for each in made.entries()] == [
        (1, 2, 0.5),
        (1, 2, 1.5),
    ]
    assert (made.left_out, made.count) == (2, 2)


WRONG = {
    "another layout": ([VLLM, SHAREGPT], "2: no prompt in it: not an entry of a list of prompts"),
    "no object": ([VLLM, 3], "2: no prompt in it"),
    "an id twice": ([OPENAI, OPENAI], '2: custom_id "a" appears twice, allowed is once'),
    "an empty prompt": ([VLLM | {"prompt": ""}], "1: prompt is empty"),
    "half a token": ([VLLM | {"output_tokens": 0.5}], "1: output_tokens is 0.5, allowed are whole numbers from 1 to"),
    "no text": ([VLLM | {"prompt": {"a": 1}}], "1: prompt is {"),
    "several outputs": ([batch(n=2)], "1: body.n is 2, allowed is 1: anything else is not modelled"),
    "an image": (
        [batch(messages=[{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}])],
        '1: body.messages has a part of type "image_url", allowed is text',
    ),
    "a number among messages": ([batch(messages=["a", 3])], "1: body.messages has 3 in it, allowed are text and"),
    "no messages": ([OPENAI | {"body": {"input": "x"}}], "1: has no body.messages or body.prompt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_named_with_its_path(name: str) -> None:
    documents, says = WRONG[name]
    assert refusal(*documents).startswith(says)


@pytest.mark.parametrize(
    "document", [{"prompt": "x", "timestamp": 1}, {"arrival_s": 1, "prompt": 5}, {"a": 1}, [], 3, None]
)
def test_what_says_when_it_arrives_or_nothing_known_is_no_prompt(document: Any) -> None:
    assert prompts_of(document) is None


def members(text: str | bytes) -> list[tuple[int, Any]]:
    content = text if isinstance(text, bytes) else text.encode()
    return list(objects_of_list(BufferedReader(io.BytesIO(content))))  # type: ignore[arg-type]


def list_refusal(text: str | bytes) -> str:
    with pytest.raises(Wrong) as refused:
        members(text)
    return f"{refused.value.line}: {refused.value}"


@LAWS
@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3), max_size=9), st.integers(0, 3))
def test_members_of_a_list_come_one_by_one_as_json_reads_them(documents: list[Any], indent: int) -> None:
    text = json.dumps(documents, indent=indent or None, ensure_ascii=False)
    found = members(text)
    assert [member for _, member in found] == documents
    if not indent:
        assert all(number == 1 for number, _ in found)


def test_a_list_is_read_across_pieces_and_its_members_know_their_lines() -> None:
    documents = [{"a": "é" * 1000, "b": index} for index in range(300)]
    text = "\ufeff\n" + json.dumps(documents, ensure_ascii=False).replace("}, {", "},\n\n{")
    assert members(text) == [(2 + 2 * index, each) for index, each in enumerate(documents)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"a": 1}\n', '2: not JSON: "," expected, the end of the file found'),
        ('[{"a": 1}\n{"a": 2}]', '2: not JSON: "," expected, "{" found'),
        ('[\n{"a": 1', "2: not JSON: "),
        ('[{"a": 1, "a": 2}]', '1: has "a" twice, allowed is once'),
        ('[{"a": 1}]\n\nx', "3: something follows the list"),
        ("[" * 10**5, "1: not a request: nested too deeply"),
        (b'[{"a": "\xff"}]', "1: not UTF-8 text"),
        ('[{"a": "' + "x" * 2**21 + '"', "1: not JSON, or longer than 1,048,576 bytes: "),
        ("[1,\n,2]", "2: not JSON: "),
        ("[1,\n]", "2: not JSON: nothing follows the last comma"),
    ],
)
def test_a_list_that_is_none_is_refused_by_its_line(text: str | bytes, says: str) -> None:
    assert list_refusal(text).startswith(says)


def test_a_number_of_thousands_of_digits_is_read_and_refused_where_it_counts() -> None:
    endless = '{"prompt": "a", "output_tokens": ' + "9" * 5000 + "}"
    for found in (objects_of_lines([(1, endless.encode())]), members(f"[{endless}]")):
        assert refusal(*(document for _, document in found)) == (
            "1: output_tokens is Infinity, allowed are whole numbers from 1 to 2,147,483,647"
        )


def test_lines_that_are_no_json_are_refused_by_their_number() -> None:
    assert [number for number, _ in objects_of_lines([(1, b"{}"), (2, b" \n"), (3, b"{}")])] == [1, 3]
    for line, says in ((b"{", "not JSON: "), (b'{"a": 1, "a": 1}', 'has "a" twice'), (b"\xff", "not UTF-8 text")):
        with pytest.raises(Wrong, match=says) as refused:
            list(objects_of_lines([(1, b"{}"), (2, line)]))
        assert refused.value.line == 2


@LAWS
@given(st.text(alphabet='[]{},:"a1 \n\\', max_size=40))
def test_any_text_is_a_list_or_one_refusal(text: str) -> None:
    with suppress(Wrong):
        assert [member for _, member in members(text)] == json.loads(text)

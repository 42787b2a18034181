"""`twin compare`: layouts or formats side by side, published quality carried with its source, refusals listed."""

from typing import Any

import pytest

from tests.cli.command import ANSWERED, DOES_NOT_FIT, WRONG_INPUT, Done, assert_one_line, run
from tests.cli.test_answers import CONTRACT, asked, assert_holds
from twin.engines import load_engine

Capture = pytest.CaptureFixture[str]

DENSE = ("--model", "qwen3.8-27b", "--ctx", "100k")
WHOLE = CONTRACT | {"published_quality": list}
PARTLY = {name: kind for name, kind in WHOLE.items() if name not in {"decode", "prefill"}}
QUALITY = {"kv_dtype": str, "metric": str, "value": float, "conditions": str, "source": str}


def compared(capsys: Capture, *arguments: str, code: int = ANSWERED) -> Any:
    answer = asked(capsys, "compare", *arguments, code=code)
    assert answer["schema"] == "twin.comparison/1"
    return answer


def choices(answer: Any) -> list[str]:
    key = {"layouts": "layout", "formats": "kv_dtype"}[answer["over"]]
    return [each["question"][key] for each in answer["predictions"]]


def table(done: Done) -> dict[str, str]:
    """Rows of a comparison of formats, by format."""
    return {row.split()[0]: row for row in done.out.splitlines()[3:] if row.strip()}


def test_formats_are_shown_in_the_order_that_they_are_named_in_and_refused_ones_with_their_reason(
    capsys: Capture,
) -> None:
    names = "kvarn_k4v2_g128, fp8,bf16,fp8_per_token_head,fp16"
    answer, rows = (
        compared(capsys, *DENSE, "--formats", names),
        table(run(capsys, "compare", *DENSE, "--formats", names)),
    )
    assert choices(answer) == list(rows)[:3] == ["kvarn_k4v2_g128", "fp8", "bf16"]
    reasons = {each["name"]: each["reason"] for each in answer["refused"]}
    for name, says in (("fp8_per_token_head", "need SM 8.9 or newer"), ("fp16", "vllm keeps no fp16 cache")):
        assert says in reasons[name]
        assert "is refused: " in rows[name]


def test_where_there_is_one_layout_formats_are_compared_with_their_published_quality(capsys: Capture) -> None:
    answer = compared(capsys, *DENSE)
    assert answer["over"] == "formats"
    assert {*choices(answer), "fp8_per_token_head"} == set(load_engine("vllm").formats)
    for each in answer["predictions"]:
        assert_holds(each, PARTLY)
    carried = {each["question"]["kv_dtype"]: each["published_quality"] for each in answer["predictions"]}
    assert carried["bf16"] == []
    for name, rows in carried.items():
        for row in rows:
            assert_holds(row, QUALITY)
            assert row["kv_dtype"] == name
            assert all(row.values())
    assert {row["value"] for row in carried["fp8"] if row["metric"] == "perplexity"} == {8.223, 8.235}
    text = run(capsys, "compare", *DENSE).out
    for source in {row["source"] for rows in carried.values() for row in rows}:
        assert f"published, not predicted: {source}\n" in text


@pytest.mark.parametrize(
    "arguments", [("--ctx", "1024M"), (*DENSE, "--formats", "bf16")], ids=["layouts", "one format"]
)
def test_where_nothing_fits_the_exit_code_says_so(capsys: Capture, arguments: tuple[str, ...]) -> None:
    answer = compared(capsys, *arguments, code=DOES_NOT_FIT)
    assert not any(each["fits"] for each in answer["predictions"])
    done = run(capsys, "compare", *arguments)
    assert (done.code, done.err) == (DOES_NOT_FIT, "")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--over engines", "'engines' is not one of 'layouts', 'formats'"),
        ("--formats fp16,fpp16", "unknown KV format 'fpp16' (did you mean fp16?"),
        ("--formats fp16,", "unknown KV format ''"),
        ("--formats fp8", "exllamav3 keeps no fp8 cache under offload"),
        ("--cached 1k", "No such option '--cached'"),
    ],
)
def test_a_wrong_comparison_is_refused_in_one_line(capsys: Capture, given: str, says: str) -> None:
    assert_one_line(run(capsys, "compare", *given.split()), WRONG_INPUT, says)

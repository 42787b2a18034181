"""The words of `twin simulate` become requests that can be read again."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.twin.serving.worlds import line
from twin.cli.workloads import Source, serve_asked, source_of
from twin.errors import Impossible

NAMES = ("requests", "rate", "prompt", "output_length", "lengths", "cv", "arrivals", "burstiness", "prefix_tokens")
NOTHING: dict[str, Any] = dict.fromkeys(NAMES) | {"seed": 0}
ASKED: dict[str, Any] = NOTHING | {
    "model": "qwen3.8-27b", "kv_dtype": "fp8", "hw": None, "engine": None, "lanes": 16, "max_model_tokens": None,
    "trace_in": None, "requests": 5,
}  # fmt: skip


def source(trace: Path | None = None, **asked: Any) -> Source:
    return source_of(trace, NOTHING | asked)


def test_a_source_can_be_read_again_from_its_start(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{line()}\n" * 3, encoding="utf-8")
    for each in (source(requests=50, rate=1.0), source(trace)):
        assert list(each.requests()) == list(each.requests())


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "1,000 requests, all at once, exponential"),
        ({"requests": 1}, "1 request, all at once, exponential"),
        ({"rate": 0.5, "lengths": "fixed"}, "1,000 requests, 0.5 a second, fixed"),
        ({"rate": float("inf")}, "1,000 requests, all at once, exponential"),
    ],
)
def test_a_workload_says_in_a_line_what_it_is(asked: dict[str, Any], text: str) -> None:
    assert source(**asked).text == f"{text} lengths of 512 and 256 tokens"


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_goes_without_the_options_of_a_made_up_workload(name: str) -> None:
    with pytest.raises(Impossible, match="means nothing beside --trace-in"):
        source(Path("trace.jsonl"), **{name: 1})


def test_prompts_without_arrivals_take_those_of_a_made_up_workload(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Who are you?"}\n' * 20, encoding="utf-8")
    words: dict[str, Any] = {"rate": 2.0, "burstiness": 0.5, "seed": 7}
    made_up = [each.arrival_s for each in source(requests=20, **words).requests()]
    served = source(path, **words, chars_per_token=4.0, output_length=9)
    assert [each.arrival_s for each in served.requests()] == made_up
    assert {(each.prompt_tokens, each.output_tokens) for each in served.requests()} == {(3, 9)}
    assert served.reading is not None
    assert served.reading.text.startswith("drawn, 2 a second; ")
    for other in ("requests", "prompt", "lengths", "cv", "prefix_tokens"):
        with pytest.raises(Impossible, match="means nothing beside --trace-in"):
            source(path, **words | {other: 1})


def test_a_pipe_is_not_looked_into_and_may_hold_either(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert source(pipe, rate=1.0, chars_per_token=4.0).once


def test_files_hold_every_finished_request_and_valid_events_with_and_without_intervals(tmp_path: Path) -> None:
    records, trace, texts = tmp_path / "done.jsonl", tmp_path / "trace.json", []
    asked = ASKED | {"requests_out": records, "trace": trace}
    before = dict(asked)
    for no_interval in (False, True):
        result = serve_asked(asked | {"no_interval": no_interval})[0].result
        texts.append((records.read_text(encoding="utf-8"), trace.read_text(encoding="utf-8")))
    assert asked == before
    without = serve_asked(asked | {"requests_out": None, "trace": None, "no_interval": True})[0]
    assert (without.result.total_s, without.fast) == (result.total_s, None)
    assert texts[0] == texts[1]
    told, events = [json.loads(each) for each in texts[0][0].splitlines()], json.loads(texts[0][1])["traceEvents"]
    assert [(each["id"], each["ttft_s"]) for each in told] == [(each.id, each.ttft_s) for each in result.requests]
    assert sum(event["name"].startswith("request ") and event["ph"] == "b" for event in events) == 5
    assert max(event.get("ts", 0) for event in events) == pytest.approx(result.total_s * 1e6)
    assert sorted(os.listdir(tmp_path)) == ["done.jsonl", "trace.json"]

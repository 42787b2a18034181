"""The words of `twin simulate` become requests that can be read again, and files that are whole or not there."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from twin.cli.workloads import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_REQUESTS,
    Source,
    serve_asked,
    source_of,
)
from twin.errors import BadFile, CannotWrite, Impossible

NAMES = ("requests", "rate", "prompt", "output_length", "lengths", "cv", "arrivals", "burstiness", "prefix_tokens")
NOTHING: dict[str, Any] = dict.fromkeys(NAMES) | {"seed": 0}
ASKED: dict[str, Any] = NOTHING | {
    "model": "qwen3.8-27b", "kv_dtype": "fp8", "hw": None, "engine": None, "lanes": 16, "max_model_tokens": None,
    "trace": None, "requests_out": None, "no_interval": True, "trace_in": None, "requests": 5,
}  # fmt: skip
LINE = '{"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 10}\n'


def source(trace: Path | None = None, **asked: Any) -> Source:
    return source_of(trace, NOTHING | asked)


def serve(**asked: Any) -> Any:
    return serve_asked(ASKED | asked)[0]


def test_defaults_are_those_of_the_help() -> None:
    requests = list(source(lengths="fixed").requests())
    assert len(requests) == DEFAULT_REQUESTS
    shapes = {(each.prompt_tokens, each.output_tokens, each.arrival_s) for each in requests}
    assert shapes == {(DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS, 0.0)}


def test_a_source_can_be_read_again_from_its_start(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(LINE * 3, encoding="utf-8")
    for each in (source(requests=50, rate=1.0), source(trace)):
        assert list(each.requests()) == list(each.requests())


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "1,000 requests, all at once, exponential lengths of 512 and 256 tokens"),
        ({"requests": 1}, "1 request, all at once, exponential lengths of 512 and 256 tokens"),
        ({"rate": 0.5, "lengths": "fixed"}, "1,000 requests, 0.5 a second, fixed lengths of 512 and 256 tokens"),
        ({"rate": float("inf")}, "1,000 requests, all at once, exponential lengths of 512 and 256 tokens"),
    ],
)
def test_a_workload_says_in_a_line_what_it_is(asked: dict[str, Any], text: str) -> None:
    assert source(**asked).text == text


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_goes_without_the_options_of_a_made_up_workload(name: str) -> None:
    with pytest.raises(Impossible, match="means nothing beside --trace-in"):
        source(Path("trace.jsonl"), **{name: 1})


def test_what_was_asked_is_not_used_up() -> None:
    asked = dict(ASKED)
    serve_asked(asked)
    assert asked == ASKED


def test_the_longest_request_is_the_model_s_own_unless_asked() -> None:
    assert serve().result.limits.max_model_tokens == 262_144
    assert serve(max_model_tokens=4096).result.limits.max_model_tokens == 4096


def test_files_hold_every_finished_request_and_valid_events(tmp_path: Path) -> None:
    records, trace = tmp_path / "done.jsonl", tmp_path / "trace.json"
    result = serve(requests_out=records, trace=trace).result
    told = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    assert [each["id"] for each in told] == [each.id for each in result.requests]
    assert {each["ttft_s"] for each in told} == {each.ttft_s for each in result.requests}
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"].startswith("request ") and event["ph"] == "b" for event in events) == 5
    assert max(event.get("ts", 0) for event in events) == pytest.approx(result.total_s * 1e6)
    assert os.listdir(tmp_path) in (["done.jsonl", "trace.json"], ["trace.json", "done.jsonl"])


def test_files_are_the_same_with_and_without_intervals(tmp_path: Path) -> None:
    texts = []
    for no_interval in (True, False):
        serve(requests_out=tmp_path / "done", trace=tmp_path / "trace", no_interval=no_interval)
        texts.append([(tmp_path / name).read_text(encoding="utf-8") for name in ("done", "trace")])
    assert texts[0] == texts[1]


def test_a_trace_that_breaks_off_leaves_old_files_and_no_new_ones(tmp_path: Path) -> None:
    broken, old, new = tmp_path / "broken.jsonl", tmp_path / "old", tmp_path / "new"
    broken.write_text(LINE * 50 + "nonsense\n", encoding="utf-8")
    old.write_text("old", encoding="utf-8")
    with pytest.raises(BadFile, match=r"broken\.jsonl:51: "):
        serve(trace_in=broken, requests=None, requests_out=old, trace=new)
    assert old.read_text(encoding="utf-8") == "old"
    assert sorted(os.listdir(tmp_path)) == ["broken.jsonl", "old"]


def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="nowhere"):
        serve(requests_out=tmp_path / "nowhere" / "done", trace=tmp_path / "trace")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_is_read_once_and_so_without_intervals(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(LINE * 4, encoding="utf-8"))
    writer.start()
    service, read = serve_asked(ASKED | {"trace_in": pipe, "requests": None, "no_interval": False})
    writer.join()
    assert service.result.completed == 4
    assert service.fast is None
    assert read.text == "trace from a pipe: read once, so no intervals"

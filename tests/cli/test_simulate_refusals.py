"""What `twin simulate` refuses: traces by file and line, options by name, in one line and with nothing left behind."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hwprofiles.recognition import kind_of_head
from tests.cli.command import ANSWERED, WRONG_INPUT, assert_one_line, child, run
from tests.cli.served import FAST, GOOD, OLD, Capture, asked, line

BAD_TRACES: dict[str, tuple[bytes, int, str]] = {
    "no prompt": ((GOOD + line(prompt_tokens=...)).encode(), 2, "has no prompt_tokens"),
    "negative time": ((GOOD + line(arrival_s=-1)).encode(), 2, "arrival_s is -1, allowed are numbers from 0"),
    "out of order": ((line(id="x") + GOOD).encode(), 2, "sort the trace by arrival"),
    "NaN": ((GOOD + line(arrival_s=float("nan"))).encode(), 2, "not a JSON object"),
    "a last line cut short": ((GOOD + line()[:30]).encode(), 2, "the file ends here"),
    "UTF-16": (GOOD.encode("utf-16"), 1, "not UTF-8 text"),
    "broken gzip": (b"\x1f\x8b nothing of the kind", 1, "broken gzip data"),
}
"""A few of what tests/twin/serving/test_traces.py has, to the end of the process."""


@pytest.mark.parametrize("case", BAD_TRACES)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_trace_is_one_line_or_document_and_leaves_old_files_as_they_were_and_no_new_ones(
    capsys: Capture, tmp_path: Path, case: str, as_json: bool
) -> None:
    content, number, says = BAD_TRACES[case]
    trace, old = tmp_path / "trace.jsonl", tmp_path / "old.jsonl"
    trace.write_bytes(content)
    old.write_text(OLD, encoding="utf-8")
    files = ("--requests-out", str(old), "--trace", str(tmp_path / "new.json"), "-o", str(tmp_path / "answer"))
    done = run(capsys, "simulate", *FAST, "--trace-in", str(trace), *files, *(["--json"] if as_json else []))
    if as_json:
        error = json.loads(done.out)["error"]
        assert (done.code, done.err, error["type"]) == (WRONG_INPUT, "", "BadFile")
        assert f"{trace}:{number}: " in error["message"]
    else:
        assert_one_line(done, WRONG_INPUT, f"{trace}:{number}: ", says)
    assert old.read_text(encoding="utf-8") == OLD
    assert sorted(os.listdir(tmp_path)) == ["old.jsonl", "trace.jsonl"]


FOREIGN = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
    "sharegpt": '[\n  {\n    "id": "a",\n    "conversations": [{"from": "human", "value": "Hi"}]\n  }\n]\n',
    "prompts": '{"prompt": "Hello", "output_tokens": 5}\n',
    "perfetto": '{"traceEvents": []}\n',
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_a_file_of_another_kind_is_named(
    capsys: Capture, tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    content = FOREIGN[name].encode()
    path = tmp_path / "file"
    path.write_bytes(pack(content))
    done = run(capsys, "simulate", *FAST, "--trace-in", str(path))
    said = f"{path}: {kind_of_head(content)}, not a trace of JSON lines (--trace-in reads"
    assert_one_line(done, WRONG_INPUT, said)


def test_what_a_trace_leaves_open_is_asked_for_by_option(capsys: Capture, tmp_path: Path) -> None:
    """Sixteen tokens a hash follow from the lengths; 60 may be seconds or milliseconds."""
    path = tmp_path / "trace.jsonl"
    text = '{"timestamp": %s, "input_length": 48, "output_length": 20, "hash_ids": [11, 12, 13]}\n'
    path.write_text(text % "0.0" + text % "60.0", encoding="utf-8")
    done = run(capsys, "simulate", *FAST, "--trace-in", str(path))
    says = "--time-unit s or ms: 60 s or ms from the first to the last of 2 requests"
    assert_one_line(done, WRONG_INPUT, f"{path}: timestamp may be in seconds or in milliseconds ({says})")
    for unit, seconds in (("s", 60), ("ms", 0.06)):
        answer = asked(capsys, *FAST, "--trace-in", str(path), "--time-unit", unit)
        assert answer["question"]["trace"] == {"time_unit": unit, "hash_tokens": 16}
        assert answer["requests"][1]["arrival_s"] == pytest.approx(seconds)
    shown = run(capsys, "simulate", *FAST, "--trace-in", str(path), "--time-unit", "s").out
    assert "\ntrace trace.jsonl; arrivals in seconds, 16 tokens a hash\n" in shown


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="no /dev/stdin here")
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_trace_may_come_through_a_pipe(name: str) -> None:
    piped = child("simulate", *FAST, "--trace-in", name, "--json", input=GOOD + line(), stdin=None)
    assert (piped.code, piped.err) == (ANSWERED, "")
    answer = json.loads(piped.out)
    assert answer["completed"] == 2
    assert answer["interval_90"] is None  # a pipe is read once


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--requests 0", "the count is 0, outside the range of 1 to "),
        ("--requests many", "not a valid integer"),
        ("--rate 0", "the rate is 0.0"),
        ("--rate fast", "not a valid float"),
        ("--prompt 0", "--prompt: '0' is outside the range of 1 to"),
        ("--output 0", "'0' is outside the range of 1 to"),
        ("--lengths odd", "'odd' is not one of"),
        ("--lengths uniform --cv 0.9", "the cv is 0.9"),
        ("--burstiness 0.5", "needs poisson arrivals at a finite rate"),
        ("--arrivals burst --rate 3", "a burst has no rate"),
        ("--seed 1.5", "not a valid integer"),
        ("--util 0", "utilisation 0 is outside the range above 0 and up to 1"),
        ("--rate 1e-300", "outside the range of 1e-09"),
        ("--pool 3", "'3' is not a size with a unit"),
        ("--max-seqs 0", "most sequences 0 is outside the range of 1 to"),
        ("--max-model-len 1", "max_model_tokens is 1, outside the range of 2 to"),
        ("--chunk 100", "not a multiple of vllm's page of 16"),
        ("--accept 2", "--accept means nothing without --spec"),
        ("--spec mtp:3", "llama-3.1-8b has no drafter"),
        ("--kv-dtype fp16", "vllm keeps no fp16 cache under vram (it keeps bf16, "),
        ("--engine exllamav3", "exllamav3"),
        ("--output answer.json", "-o FILE writes the answer"),
        ("--model qwen3.8-flash-next", "exllamav3 shares no pool of blocks among requests"),
        ("--model qwen3.8-27b --kv-dtype fp8_per_token_head --hw rtx3090", "need SM 8.9 or newer, NVIDIA GeForce RTX"),
        ("--model qwen3.8-27b --spec mtp:3 --accept 4.01", "accepted tokens 4.01 is outside the range of 1 to 4"),
        ("--engine twin", "twin shares no pool of blocks among requests"),
        ("--hw 3x-rtx3090", "vllm is modelled on one device"),
        ("--layout vram", "No such option '--layout'"),
        ("--time-unit ms", "--time-unit means nothing without --trace-in"),
        ("--trace-in x.jsonl --time-unit us", "'us' is not one of 's', 'ms'"),
        ("--trace-in x.jsonl --hash-tokens 0", "--hash-tokens: '0' is outside the range of 1 to"),
        ("--trace-in x.jsonl --rate 3", "--rate means nothing beside --trace-in"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(capsys: Capture, given: str, says: str) -> None:
    assert_one_line(run(capsys, "simulate", *FAST, *given.split()), WRONG_INPUT, says)


def test_a_rate_that_the_machine_lacks_is_named(capsys: Capture) -> None:
    done = run(capsys, "simulate", "--model", "llama-3.1-8b", "--hw", "rtx3090", "--requests", "2")
    assert_one_line(done, WRONG_INPUT, "machine rtx3090 has no rate for ")
    assert len(done.err) < 300


def test_what_is_refused_leaves_a_stream_that_a_trace_would_go_to_as_it_was() -> None:
    done = child("simulate", "--trace", "/dev/stderr", "--requests", "5", "--kv-dtype", "exl3_k5v8")
    assert_one_line(done, WRONG_INPUT, "keeps no exl3_k5v8 cache")

"""`twin simulate`: the contract, seeds and traces, files that are whole or absent, and what it refuses in one line."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hwprofiles.recognition import kind_of_head
from tests.cli.command import ANSWERED, DOES_NOT_FIT, WRONG_INPUT, assert_one_line, child, run
from tests.cli.test_answers import asked as answered
from tests.cli.test_answers import assert_holds
from tests.twin.serving import worlds

Capture = pytest.CaptureFixture[str]

FAST = ("--model", "llama-3.1-8b", "--hw", "h200")
"""A model and a machine on which a request takes little time to simulate."""
SMALL = (*FAST, "--requests", "20", "--prompt", "300", "--output", "30")
OLD = "what was there before\n"


def line(**changed: Any) -> str:
    """A line of a trace; a field set to ... is left out."""
    return worlds.line(**({"prompt_tokens": 100, "output_tokens": 20, "id": "b"} | changed)) + "\n"


GOOD = line(arrival_s=0.0, id="a")


def asked(capsys: Capture, *arguments: str, code: int = ANSWERED) -> Any:
    return answered(capsys, "simulate", *arguments, code=code)


TIMES = {"p50": float, "p90": float, "p99": float, "mean": float, "min": float, "max": float}
INTERVAL = {"low": float, "high": float}
CONTRACT = {
    "schema": str, "total_s": float, "output_tokens_per_s": float, "requests_per_s": float, "completed": int,
    "question": {"model": str, "hw": str, "engine": str, "layout": str, "kv_dtype": str, "workload": str},
    "prompt_tokens": int, "output_tokens": int,
    "ttft_s": TIMES, "itl_s": TIMES, "tpot_s": TIMES, "e2e_s": TIMES, "queue_s": TIMES,
    "resident_max": int, "resident_mean": float, "preemptions": int,
    "pool": {"blocks": int, "peak_blocks": int, "kv_pool_tokens": int, "block_tokens": int},
    "rejected_count": int, "rejected": list, "timeline": {"bin_s": float, "points": list}, "requests": list,
    "interval_90": {
        "total_s": INTERVAL, "output_tokens_per_s": INTERVAL, "ttft_p50_s": INTERVAL, "itl_p50_s": INTERVAL,
    },
}  # fmt: skip
"""Keys may be added to it, never taken away: scripts rely on them."""
RECORD = {
    "id": int, "arrival_s": float, "prompt_tokens": int, "output_tokens": int, "cached_tokens": int, "queue_s": float,
    "ttft_s": float, "e2e_s": float, "preemptions": int,
}  # fmt: skip


def test_the_options_of_a_workload_make_an_answer_that_keeps_its_contract(capsys: Capture) -> None:
    workload = ("--requests", "40", "--rate", "20", "--prompt", "400", "--output", "60", "--seed", "3")
    answer = asked(capsys, *FAST, *workload)
    assert_holds(answer, CONTRACT)
    assert answer["schema"] == "twin.simulation/1"
    assert answer["question"]["workload"].startswith("40 requests, 20 a second, ")
    assert answer["completed"] == len(answer["requests"]) == 40
    for record in answer["requests"]:
        assert_holds(record, RECORD)
        assert (record["tpot_s"] is None) == (record["output_tokens"] == 1)
    assert sum(record["output_tokens"] for record in answer["requests"]) == answer["output_tokens"]
    assert answer["output_tokens_per_s"] == pytest.approx(answer["output_tokens"] / answer["total_s"])
    for times in ("ttft_s", "itl_s", "e2e_s"):
        told = answer[times]
        assert told["min"] <= told["p50"] <= told["p90"] <= told["p99"] <= told["max"]
    for ends in answer["interval_90"].values():
        assert ends["low"] <= ends["high"]


def test_the_same_seed_gives_the_same_answer_in_any_process_and_another_seed_another(capsys: Capture) -> None:
    command = ("simulate", *SMALL, "--rate", "5", "--json")
    here = run(capsys, *command, "--seed", "4").out
    elsewhere = child(*command, "--seed", "4", env=os.environ | {"PYTHONHASHSEED": "77"}).out
    assert here == elsewhere
    assert here != run(capsys, *command, "--seed", "5").out


@pytest.mark.parametrize("given", ["--pool 1KiB", "--pool 100TB", "--util 0.05", "--max-model-len 2 --prompt 5"])
def test_a_workload_that_cannot_run_is_an_answer_with_its_own_code(capsys: Capture, given: str) -> None:
    arguments = (*FAST, "--requests", "5", "--prompt", "300", "--lengths", "fixed", *given.split())
    answer = asked(capsys, *arguments, code=DOES_NOT_FIT)
    assert_holds(
        answer,
        CONTRACT | dict.fromkeys(("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"), dict) | {"interval_90": type(None)},
    )
    assert answer["completed"] == 0
    assert answer["rejected_count"] == len(answer["rejected"]) == 5
    assert answer["ttft_s"]["p50"] is None
    text = run(capsys, "simulate", *arguments)
    assert (text.code, text.err) == (DOES_NOT_FIT, "")
    assert "0 requests in " in text.out


def test_records_can_be_served_again(capsys: Capture, tmp_path: Path) -> None:
    """A record names its request as a trace does; only the order is that of the ends."""
    done, again = tmp_path / "done.jsonl", tmp_path / "again.jsonl"
    first = asked(capsys, *SMALL, "--rate", "50", "--requests-out", str(done))
    records = sorted(done.read_text(encoding="utf-8").splitlines(), key=lambda text: json.loads(text)["arrival_s"])
    again.write_text("\n".join(records) + "\n", encoding="utf-8")
    assert asked(capsys, *FAST, "--trace-in", str(again))["requests"] == first["requests"]


@pytest.mark.parametrize(
    ("first", "second"),
    [("--requests-out", "--trace"), ("--requests-out", "-o"), ("--trace-in", "--requests-out"), ("--trace-in", "-o")],
)
def test_one_file_is_not_taken_twice(capsys: Capture, tmp_path: Path, first: str, second: str) -> None:
    path = tmp_path / "file"
    path.write_text(GOOD, encoding="utf-8")
    done = run(capsys, "simulate", *FAST, first, str(path), second, str(path))
    assert_one_line(done, WRONG_INPUT, " name one file: ", first, second)
    assert path.read_text(encoding="utf-8") == GOOD


@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_trace_is_one_line_or_document_and_leaves_old_files_as_they_were_and_no_new_ones(
    capsys: Capture, tmp_path: Path, as_json: bool
) -> None:
    trace, old = tmp_path / "trace.jsonl", tmp_path / "old.jsonl"
    trace.write_text(GOOD + line()[:30], encoding="utf-8")
    old.write_text(OLD, encoding="utf-8")
    files = ("--requests-out", str(old), "--trace", str(tmp_path / "new.json"), "-o", str(tmp_path / "answer"))
    done = run(capsys, "simulate", *FAST, "--trace-in", str(trace), *files, *(["--json"] if as_json else []))
    if as_json:
        error = json.loads(done.out)["error"]
        assert (done.code, done.err, error["type"]) == (WRONG_INPUT, "", "BadFile")
        assert f"{trace}:2: " in error["message"]
    else:
        assert_one_line(done, WRONG_INPUT, f"{trace}:2: ", "the file ends here")
    assert old.read_text(encoding="utf-8") == OLD
    assert sorted(os.listdir(tmp_path)) == ["old.jsonl", "trace.jsonl"]


def test_a_file_of_another_kind_is_named(capsys: Capture, tmp_path: Path) -> None:
    content, path = b"PAR1 and so on\n", tmp_path / "file"
    for packed in (content, gzip.compress(content)):
        path.write_bytes(packed)
        done = run(capsys, "simulate", *FAST, "--trace-in", str(path))
        says = f"{path}: {kind_of_head(content)}, not a trace of requests (--trace-in reads"
        assert_one_line(done, WRONG_INPUT, says)


def test_a_table_is_served_and_the_answer_says_how_it_was_read(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    header = "Timestamp,Model,Request tokens,Response tokens\n"
    path.write_text(f"{header}5,GPT-4,47,18\n6,GPT-4,47,0\n7.5,GPT-4,30,2\n", encoding="utf-8")
    shown = run(capsys, "simulate", *FAST, "--trace-in", str(path)).out
    says = "arrivals in seconds; a BurstGPT trace (CSV); failed requests left out: 1"
    assert f"\ntrace trace.csv; {says}\n" in shown
    answer = asked(capsys, *FAST, "--trace-in", str(path))
    assert [each["arrival_s"] for each in answer["requests"]] == [0, 2.5]
    assert answer["question"]["trace"] == {
        "time_unit": "s", "hash_tokens": None, "layout": "a BurstGPT trace (CSV)",
        "left_out": "failed requests left out: 1",
    }  # fmt: skip


def test_prompts_ask_for_a_rate_and_characters_a_token_and_say_so(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is the capital of India?", "output_tokens": 10}\n' * 3, encoding="utf-8")
    words = ("--trace-in", str(path), "--rate", "2", "--arrivals", "constant")
    assert_one_line(run(capsys, "simulate", *FAST, *words), WRONG_INPUT, "which says nothing of tokens (--chars-per-t")
    answer = asked(capsys, *FAST, *words, "--chars-per-token", "4")
    assert [(each["arrival_s"], each["prompt_tokens"]) for each in answer["requests"]] == [(0, 7), (0.5, 7), (1, 7)]
    shown = run(capsys, "simulate", *FAST, *words, "--chars-per-token", "4").out
    assert "arrivals drawn, 2 a second; a list of prompts without" in shown
    assert "; tokens estimated at 4 characters each\n" in shown


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
    assert answer["interval_90"] is None
    assert answer["question"]["workload"] == "trace from a pipe: read once, so no intervals"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--requests many", "not a valid integer"),
        ("--rate fast", "not a valid float"),
        ("--lengths odd", "'odd' is not one of"),
        ("--lengths uniform --cv 0.9", "the cv is 0.9"),
        ("--burstiness 0.5", "needs poisson arrivals at a finite rate"),
        ("--seed 1.5", "not a valid integer"),
        ("--max-model-len 1", "max_model_tokens is 1, outside the range of 2 to"),
        ("--output answer.json", "-o FILE writes the answer"),
        ("--hw rtx3090 --strict", "not measured on rtx3090: "),
        ("--hw 3x-rtx3090", "3 ranks do not share 32 query heads"),
        ("--layout vram", "No such option '--layout'"),
        ("--time-unit ms", "--time-unit means nothing without --trace-in"),
        ("--trace-in x.jsonl --time-unit us", "'us' is not one of 's', 'ms'"),
        ("--chars-per-token 4", "--chars-per-token means nothing without --trace-in"),
        ("--trace-in x.jsonl --chars-per-token 0", "--chars-per-token is 0.0, outside the range of 0.1 to 100.0"),
        ("--trace-in x.jsonl --chars-per-token nan", "--chars-per-token is nan, outside the range of 0.1 to 100.0"),
        ("--trace-in nonesuch.jsonl --chars-per-token 4", "nonesuch.jsonl: cannot be read: No such file or directory"),
        ("--trace-in x.jsonl --hash-tokens 0", "--hash-tokens: '0' is outside the range of 1 to"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(capsys: Capture, given: str, says: str) -> None:
    assert_one_line(run(capsys, "simulate", *FAST, *given.split()), WRONG_INPUT, says)


def test_what_is_refused_leaves_a_stream_that_a_trace_would_go_to_as_it_was() -> None:
    done = child("simulate", "--trace", "/dev/stderr", "--requests", "5", "--kv-dtype", "exl3_k5v8")
    assert_one_line(done, WRONG_INPUT, "keeps no exl3_k5v8 cache")

"""`twin simulate`: the contract, seeds, traces, speculation, and what cannot run."""

import os
from pathlib import Path

import pytest

from tests.cli.command import ANSWERED, DOES_NOT_FIT, child, run
from tests.cli.served import FAST, GOOD, SMALL, Capture, asked, line
from tests.cli.test_answers import assert_holds

TIMES = {"p50": float, "p90": float, "p99": float, "mean": float, "min": float, "max": float}
INTERVAL = {"low": float, "high": float}
CONTRACT = {
    "schema": str,
    "question": {"model": str, "hw": str, "engine": str, "layout": str, "kv_dtype": str, "workload": str},
    "total_s": float,
    "output_tokens_per_s": float,
    "requests_per_s": float,
    "completed": int,
    "prompt_tokens": int,
    "output_tokens": int,
    "ttft_s": TIMES,
    "itl_s": TIMES,
    "tpot_s": TIMES,
    "e2e_s": TIMES,
    "queue_s": TIMES,
    "resident_max": int,
    "resident_mean": float,
    "preemptions": int,
    "pool": {"blocks": int, "peak_blocks": int, "kv_pool_tokens": int, "block_tokens": int},
    "rejected_count": int,
    "rejected": list,
    "timeline": {"bin_s": float, "points": list},
    "requests": list,
    "interval_90": {
        "total_s": INTERVAL,
        "output_tokens_per_s": INTERVAL,
        "ttft_p50_s": INTERVAL,
        "itl_p50_s": INTERVAL,
    },
}
"""Keys may be added to it, never taken away: scripts rely on them."""
RECORD = {
    "id": int,
    "arrival_s": float,
    "prompt_tokens": int,
    "output_tokens": int,
    "cached_tokens": int,
    "queue_s": float,
    "ttft_s": float,
    "e2e_s": float,
    "preemptions": int,
}


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


def test_a_trace_is_served_with_its_times_and_ids(capsys: Capture, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD + line(arrival_s=2.5, prompt_tokens=7, output_tokens=3), encoding="utf-8")
    answer = asked(capsys, *FAST, "--trace-in", str(trace))
    assert answer["question"]["workload"] == "trace trace.jsonl"
    first, second = answer["requests"]
    assert (first["id"], first["arrival_s"], first["prompt_tokens"], first["output_tokens"]) == ("a", 0.0, 100, 20)
    assert (second["id"], second["arrival_s"], second["prompt_tokens"], second["output_tokens"]) == ("b", 2.5, 7, 3)
    assert answer["total_s"] > 2.5


def test_without_any_option_something_is_served() -> None:
    done = child("simulate")
    assert (done.code, done.err) == (ANSWERED, "")
    assert "\n1,000 requests in " in done.out


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

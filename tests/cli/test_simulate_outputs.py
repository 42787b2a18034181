"""Files of `twin simulate` are whole or absent, whatever happens; pipes and interruptions end it quietly."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import (
    CHILD,
    CLOSED_PIPE,
    INTERRUPTED,
    WRONG_INPUT,
    assert_one_line,
    child,
    run,
)
from tests.cli.served import FAST, GOOD, OLD, SMALL, Capture, asked


def test_a_trace_for_perfetto_shows_steps_residents_and_requests(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    answer = asked(capsys, *SMALL, "--trace", str(path))
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "b", "e"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert sum(event["args"]["steps"] for event in events if event["ph"] == "X") == answer["steps"]
    assert max(event["args"]["sequences"] for event in events if event["ph"] == "C") == answer["resident_max"]
    begun = [event["id"] for event in events if event["ph"] == "b" and event["name"].startswith("request ")]
    assert len(begun) == answer["completed"]


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


@pytest.mark.parametrize(
    "arguments", [SMALL, (*SMALL, "--json"), (*SMALL, "--requests-out", "/dev/stdout", "-o", os.devnull)]
)
def test_a_closed_pipe_is_141_and_silent(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = child("simulate", *arguments, stdout=writer)
    os.close(writer)
    assert (done.code, done.err) == (CLOSED_PIPE, "")


def test_an_interrupted_run_leaves_old_files_as_they_were_and_no_new_ones(tmp_path: Path) -> None:
    """A million requests take minutes; the signal comes once both files have been begun beside their places."""
    old = tmp_path / "old.jsonl"
    old.write_text(OLD, encoding="utf-8")
    files = ("--requests-out", str(old), "--trace", str(tmp_path / "new.json"))
    arguments = [*CHILD, "simulate", *FAST, "--requests", "1000000", "--rate", "20", *files]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_until(lambda: any(each.stat().st_size for each in tmp_path.glob(".old.jsonl.*")), running)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    assert (running.returncode, out, err) == (INTERRUPTED, "", "twin: interrupted\n")
    assert old.read_text(encoding="utf-8") == OLD
    assert os.listdir(tmp_path) == ["old.jsonl"]


def wait_until(happened: Any, running: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if happened():
            return
        assert running.poll() is None, running.stderr and running.stderr.read()
        time.sleep(0.01)
    raise TimeoutError

"""Signals at random moments of a run, from its start-up to its end: what each leaves, by exit code, line and files.

    python -m tests.hostile.kills --runs 300 [--seed 1] [--calibrate 6]

SIGINT and SIGTERM: a documented exit code, one line, old files whole or replaced as a whole, nothing beside them.
SIGKILL: old files whole, and the next run sweeps what was left. A process that dies of the signal itself, or with
Python's own traceback of its start-up, had not reached its first line: counted apart, for nothing can catch it.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OLD = "what was there before\n"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
OWN = ("/twin/", "/calibrate/", "/hwprofiles/", "/click/", "/realkernels/")
"""Whose lines in a traceback say that the command had begun."""


class Run(NamedTuple):
    """A command and the files that it writes."""

    words: str
    writes: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    """Files that may stay beside: what a continued run begins with."""


FILES = "--trace trace -o answer"
SERVED = f"simulate --model llama-3.1-8b --hw h200 --requests 1500 --rate 10 --requests-out done {FILES}"
RUNS = (Run(f"predict {FILES}", ("trace", "answer")), Run(SERVED, ("done", "trace", "answer")))
CALIBRATION = Run(
    "calibrate --device cpu --quick -o me.json", ("me.json", "me.record.json"), keeps=("me.json.partial.json",)
)


def command(run: Run) -> list[str]:
    """By the installed script where there is one: it is what people stop."""
    script = Path(sys.executable).with_name("twin")
    return [*([str(script)] if script.exists() else [sys.executable, "-m", "cli"]), *run.words.split()]


Files = dict[str, str]
"""What a run that nobody stops writes: the same every time."""


def whole(run: Run) -> tuple[float, Files]:
    """Seconds and files of a run that nobody stops."""
    with tempfile.TemporaryDirectory() as place:
        begin = time.monotonic()
        subprocess.run(command(run), cwd=place, capture_output=True, check=True)
        took_s = time.monotonic() - begin
        return took_s, {name: (Path(place) / name).read_text(encoding="utf-8") for name in run.writes}


def stopped(run: Run, number: int, after_s: float, expected: Files) -> tuple[str, str]:
    """(what came of it, what is wrong with it) of one run that gets the signal `number` after `after_s`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in run.writes:
            (folder / name).write_text(OLD, encoding="utf-8")
        process = subprocess.Popen(command(run), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(after_s)
        process.send_signal(number)
        _, err = process.communicate()
        came = _came(process.returncode, err, number)
        wrong = "" if came != "wrong" else f"exit code {process.returncode}: {err[-300:]}"
        wrong = wrong or _files(run, folder, expected, left_allowed=number == signal.SIGKILL)
        if not wrong and number == signal.SIGKILL and expected:
            subprocess.run(command(run), cwd=folder, capture_output=True, check=True)
            wrong = _files(run, folder, expected, left_allowed=False)
        return came, wrong


def _came(code: int, err: str, number: int) -> str:
    """`ended` before the signal, `answered` it, `early`: before the first line; or `wrong`."""
    if code == 0:
        return "ended"
    if code == -number:
        return "early" if number != signal.SIGKILL else "answered"
    if number in CODES and code == CODES[signal.Signals(number)] and err.count("\n") == 1:
        return "answered"
    if "Traceback" in err and not any(f"{ROOT}{room}" in err or f"site-packages{room}" in err for room in OWN):
        return "early"
    return "wrong"


def _files(run: Run, folder: Path, expected: Files, *, left_allowed: bool) -> str:
    """What is wrong with the files; empty where each is the old one or a new one to its end."""
    beside = sorted(set(os.listdir(folder)) - {*run.writes, *run.keeps})
    if beside and not (left_allowed and all(name.endswith(".twin-unfinished") for name in beside)):
        return f"left behind: {beside}"
    for name in run.writes:
        text = (folder / name).read_text(encoding="utf-8")
        if text != OLD and text != expected.get(name, text):
            return f"half a file: {name}"
    return ""


def main() -> None:
    """Stop as many runs as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--calibrate", type=int, default=0)
    parser.add_argument("--calibrate-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print(json.dumps(stop_many(asked.runs, asked.seed, RUNS)))
    if asked.calibrate:
        print(json.dumps(stop_many(asked.calibrate, asked.seed, (CALIBRATION,), asked.calibrate_seconds)))


def stop_many(runs: int, seed: int, kinds: tuple[Run, ...], long_s: float | None = None) -> dict[str, int]:
    """How many of each signal came to what; defects are printed as they are found."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a caller ignores its children ignore
    draw = random.Random(seed)  # noqa: S311
    known = {run: (long_s, {}) if long_s else whole(run) for run in kinds}
    counts: Counter[str] = Counter()
    for index in range(runs):
        run = kinds[index // 3 % len(kinds)]
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[index % 3]
        most_s, expected = known[run]
        after_s = draw.uniform(0.0, most_s)
        came, wrong = stopped(run, number, after_s, expected)
        counts[f"{number.name} {came}"] += 1
        if wrong:
            counts["defects"] += 1
            told = {"words": run.words, "signal": number.name, "after_s": after_s, "wrong": wrong}
            print(json.dumps(told), flush=True)
    signal.signal(signal.SIGINT, before)
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    main()

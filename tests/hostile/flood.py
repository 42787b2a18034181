"""Thousands of hostile calls, each a process of its own with bounds on time and memory; what ends badly is reported.

    python -m tests.hostile.flood --commands 10000 --files 10000 --seed 1 [--seconds 3600] [--begin 500] [--jobs 2]

A case is its seed, kind and number, so a run goes on with --begin and a case comes again with --only commands/123.
"""

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.hostile.cases import Case, command_case, file_case
from tests.hostile.verdict import Ended, wrong_with

MAKE = {"commands": command_case, "files": file_case}
MOST_S, MOST_BYTES = 10.0, 500 * 2**20
"""Of a processor, so that a busy machine does not count, and of memory."""
LONGEST_WAIT_S = 60.0
STOPS_AT_BYTES = 4 * 2**30
"""Address space, so that a runaway does not take the machine along."""
SHRINKING_RUNS = 40


def ended(case: Case) -> tuple[Ended, float, int]:
    """(how it ended, seconds of a processor, bytes at most in memory) of one call in an empty folder."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        folder = Path(place)
        for name, content in case.files.items():
            (folder / name).write_bytes(content)
        command = [os.fsencode(word) for word in (sys.executable, "-m", "cli", *case.words)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(command, cwd=folder, env=os.environ | case.environment, **streams)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (STOPS_AT_BYTES, STOPS_AT_BYTES))
        late = threading.Timer(LONGEST_WAIT_S, process.kill)
        late.start()
        _, status, used = os.wait4(process.pid, 0)
        late.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        took_s = LONGEST_WAIT_S if process.returncode == -9 else used.ru_utime + used.ru_stime
        left = tuple(sorted(set(os.listdir(folder)) - set(case.files)))
        texts = [_read(stream) for stream in (out, err)]
    return Ended(process.returncode, *texts, left), took_s, used.ru_maxrss * 1024


def _read(stream: "tempfile._TemporaryFileWrapper[bytes]") -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", "surrogateescape")


def judged(case: Case) -> str:
    """What is wrong with a call, its bounds included."""
    how, took_s, used_bytes = ended(case)
    if took_s >= MOST_S:
        return f"slow: {took_s:.0f} s"
    if used_bytes > MOST_BYTES:
        return f"large: {used_bytes >> 20} MiB"
    return wrong_with(how, case.words)


def shrunk(case: Case, defect: str) -> Case:
    """Fewer and shorter words with which the same kind of defect comes again."""
    kind, runs = defect.partition(":")[0], 0
    for at in reversed(range(len(case.words))):
        for instead in ((), (case.words[at][:20],)):
            words = (*case.words[:at], *instead, *case.words[at + 1 :])
            if words == case.words or runs >= SHRINKING_RUNS:
                continue
            runs += 1
            smaller = dataclasses.replace(case, words=words)
            if judged(smaller).partition(":")[0] == kind:
                case = smaller
                break
    return case


def main() -> None:
    """Run the flood that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in MAKE:
        parser.add_argument(f"--{kind}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    if asked.only:
        kind, number = asked.only.split("/")
        case = MAKE[kind](f"{asked.seed}/{kind}/{number}")
        print(case.words, case.files, *ended(case), judged(case) or "nothing is wrong", sep="\n")
        return
    deadline = time.monotonic() + asked.seconds
    names = [f"{kind}/{number}" for kind in MAKE for number in range(asked.begin, asked.begin + getattr(asked, kind))]
    codes: Counter[str] = Counter()
    with ThreadPoolExecutor(asked.jobs) as pool:
        for name, defect in pool.map(lambda name: _one(name, asked, deadline), names):
            codes[defect.partition(":")[0] if defect else name.partition("/")[0]] += 1
            if defect == UNTRIED:
                break
    print(json.dumps({"seed": asked.seed, "begin": asked.begin, **codes}))


UNTRIED = "not tried: the time is over"


def _one(name: str, asked: argparse.Namespace, deadline: float) -> tuple[str, str]:
    if time.monotonic() > deadline:
        return name, UNTRIED
    case = MAKE[name.partition("/")[0]](f"{asked.seed}/{name}")
    defect = judged(case)
    if defect:
        small = shrunk(case, defect)
        told = {"case": name, "defect": defect, "words": [word[:200] for word in small.words], **small.environment}
        print(json.dumps(told), flush=True)
    return name, defect


if __name__ == "__main__":
    main()

"""How long an answer takes: in a warm process, as a whole command, and how much memory it needs.

Run with `--benchmark-enable`; as tests they run once each and check that what is timed is right.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from hwprofiles import load_profile
from twin.ask.question import Question
from twin.cost.roofline import Roofs
from twin.prediction import Prediction, predict, prefill_breakdown
from twin.units import MIB

Result = TypeVar("Result")

MACHINE = load_profile("3x-rtx3090")
MILLION = 1 << 20
QUESTIONS = {
    "vram 200k": Question(ctx_tokens=200 * 1024, layout="vram"),
    "offload 1M": Question(ctx_tokens=MILLION),
    "offload 1M, copies overlapped": Question(ctx_tokens=MILLION, copies="overlapped"),
    "offload 4M": Question(ctx_tokens=4 * MILLION),
}
COMMANDS = ("--help", "predict --ctx 1M --layout offload", "predict --ctx 1M --explain", "compare --ctx 200k")
MOST_MIB = 64
"""Far above what a command needs: a new heavy import does not pass unseen."""


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_warm_prediction(benchmark: BenchmarkFixture, name: str) -> None:
    answer: Prediction = benchmark(predict, QUESTIONS[name], MACHINE)
    assert answer.fits


def rounds_of(benchmark: BenchmarkFixture, run: Callable[[], Result], *, rounds: int) -> Result:
    """What `run` returns; so many rounds of one call each, for what takes long or starts a process."""
    result: Result = benchmark.pedantic(run, rounds=rounds)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("copies", ["serial", "overlapped"])
def test_a_prefill_from_few_chunks(benchmark: BenchmarkFixture, copies: str) -> None:
    case = predict(Question(ctx_tokens=MILLION, copies=copies), MACHINE).case  # type: ignore[arg-type]
    assert benchmark(lambda: prefill_breakdown(case, Roofs(MACHINE))).seconds > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_process(benchmark: BenchmarkFixture, command: str) -> None:
    arguments = [sys.executable, "-m", "cli", *command.split()]
    done = rounds_of(benchmark, lambda: subprocess.run(arguments, capture_output=True, check=True), rounds=10)
    assert done.stdout


MEASURED_RUN = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "cli", *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), used.ru_utime + used.ru_stime)
"""


def measured(*words: str) -> tuple[float, float]:
    """Largest resident size and processor seconds of a command that is the only child of its parent."""
    command = [sys.executable, "-c", MEASURED_RUN, *words]
    peak_bytes, seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(peak_bytes), float(seconds)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_memory_of_a_process(benchmark: BenchmarkFixture, command: str) -> None:
    """Shown under extra_info."""
    peak_bytes, _ = rounds_of(benchmark, lambda: measured(*command.split()), rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak_bytes / MIB, 1)
    assert peak_bytes < MOST_MIB * MIB


@pytest.mark.parametrize(
    "words",
    [
        "--model llama-3.1-8b --hw h200 --requests 1000 --rate 10 --prompt 512 --output 256",
        "--model qwen3.8-27b --kv-dtype fp8 --requests 1000 --prompt 512 --output 256",
    ],
)
def test_a_thousand_requests_take_a_second_or_so_and_little_memory(words: str, tmp_path: Path) -> None:
    """With three runs, records and a trace written: what `simulate` does at its slowest.

    1.2 s and 60 MB are aimed at. A busy machine is given five times the time; memory depends on no neighbour.
    """
    files = ("--requests-out", str(tmp_path / "done.jsonl"), "--trace", str(tmp_path / "trace.json"))
    peak_bytes, seconds = measured("simulate", *words.split(), *files)
    print(f"{words}: {seconds:.2f} s of processor time, {peak_bytes / 1e6:.1f} MB")
    assert peak_bytes < 60e6
    assert seconds < 5 * 1.2

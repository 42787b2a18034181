"""How long an answer takes: in a warm process, as a whole command, and how much memory it needs.

Run with `--benchmark-enable`; as tests they run once each and check that what is timed is right.
"""

import subprocess
import sys
from collections.abc import Callable
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
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_memory_of_a_process(benchmark: BenchmarkFixture, command: str) -> None:
    """Largest resident size of a command that is the only child of its parent; shown under extra_info."""

    def peak_bytes() -> int:
        arguments = [sys.executable, "-c", MEASURED_RUN, *command.split()]
        reported = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        return int(reported) * (1 if sys.platform == "darwin" else 1024)

    peak = rounds_of(benchmark, peak_bytes, rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak / MIB, 1)
    assert peak < MOST_MIB * MIB

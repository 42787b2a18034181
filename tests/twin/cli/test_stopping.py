"""SIGINT and SIGTERM end a run in one line and with a code of their own, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from twin.cli import stopping

ROOT = Path(__file__).parents[3]
SIGNALS = [("SIGINT", 130, "twin: interrupted\n"), ("SIGTERM", 143, "twin: terminated\n")]


def run(code: str, *words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


BEGIN = "import atexit, os, signal, sys\nfrom twin.cli import stopping\n"
LEAVES = """
stopping.handle_with(stopping.leave)
stopping.unfinished.add(sys.argv[2])
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
print("still here")
"""
LOST = """
stopping.handle_with(stopping.stop)
stopping.own_process()

class Noisy:
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))

Noisy()
print("still here")
"""
TWICE = """
stopping.handle_with(stopping.stop)
number = getattr(signal, sys.argv[1])
try:
    os.kill(os.getpid(), number)
finally:
    os.kill(os.getpid(), number)
    print("still here")
"""


@pytest.mark.parametrize(("name", "code", "line"), SIGNALS)
def test_whoever_leaves_takes_unfinished_files_along(tmp_path: Path, name: str, code: int, line: str) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.write_text("half", encoding="utf-8")
    assert run(BEGIN + LEAVES, name, str(unfinished)) == (code, "", line)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "code", "line"), SIGNALS)
@pytest.mark.parametrize("program", [LOST, TWICE], ids=["lost in a destructor", "a second time"])
def test_a_signal_is_never_lost(program: str, name: str, code: int, line: str) -> None:
    assert run(BEGIN + program, name) == (code, "", line)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, stopping.Terminated)]
)
def test_while_work_is_done_a_signal_is_raised(number: int, raised: type[BaseException]) -> None:
    before = stopping.handle_with(stopping.stop)
    with pytest.raises(raised):
        os.kill(os.getpid(), number)
    assert {signal.getsignal(each) for each in stopping.ENDS} == {stopping.leave}
    stopping.restore(before)
    assert {each: signal.getsignal(each) for each in stopping.ENDS} == before


def test_a_signal_that_the_caller_ignores_stays_ignored_and_another_thread_leaves_them_alone() -> None:
    """As `nohup` and the background of a script do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        told = stopping.handle_with(stopping.stop)
        assert signal.SIGINT not in told
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        stopping.restore(told)
    finally:
        signal.signal(signal.SIGINT, before)
    elsewhere: list[dict[int, object]] = []
    thread = threading.Thread(target=lambda: elsewhere.append(stopping.handle_with(stopping.stop)))
    thread.start()
    thread.join()
    assert elsewhere == [{}]


KEEPS_SIGNALS = """
import signal
before = [signal.getsignal(each) for each in (2, 15)]
import cli
assert before == [signal.getsignal(each) for each in (2, 15)]
"""
LOADS = """
import sys, signal
before = set(sys.modules)
from twin.cli import stopping
print(*sorted(set(sys.modules) - before - {"__future__"}))
"""
WAITED_FOR = f"""{BEGIN}
stopping.own_process()
atexit.register(lambda: print("called", flush=True))
sys.exit(stopping.leaving_with(3))
"""


@pytest.mark.parametrize(
    ("program", "code", "out"),
    [(KEEPS_SIGNALS, 0, ""), (LOADS, 0, "atexit twin twin.cli twin.cli.stopping\n"), (WAITED_FOR, 3, "called\n")],
    ids=["whoever imports it keeps signals", "loaded first, it loads little", "what waits for the end is called"],
)
def test_a_process_is_left_as_others_want_it(program: str, code: int, out: str) -> None:
    assert run(program) == (code, out, "")


def test_a_bug_keeps_its_traceback_and_exit_code() -> None:
    code, out, err = run(f"{BEGIN}stopping.own_process(); 1 / 0")
    assert (code, out, "ZeroDivisionError" in err) == (1, "", True)

"""Running `twin`: in this process for speed, or in a child where the process itself is what is tested."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cli

CHILD = (sys.executable, "-m", "cli")
# The documented exit codes, spelled out: scripts rely on the numbers.
ANSWERED, WRONG_INPUT, DOES_NOT_FIT, CANNOT_WRITE, INTERRUPTED, CLOSED_PIPE, TERMINATED = 0, 2, 3, 5, 130, 141, 143

FULL_DISK = Path("/dev/full")


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """`twin` in this process."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    code = left.value.code
    assert isinstance(code, int)
    return Done(code, *capsys.readouterr())


def child(*arguments: str, **options: Any) -> Done:
    """`twin` in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    done = subprocess.run([*CHILD, *arguments], text=True, check=False, **pipes)
    return Done(done.returncode, done.stdout or "", done.stderr or "")


def assert_one_line(done: Done, code: int, *pieces: str) -> None:
    """A refusal: the documented exit code, nothing on standard output, one line on standard error."""
    assert done.code == code, done.err
    assert done.out == ""
    assert done.err.startswith("twin: ")
    assert done.err.count("\n") == 1
    assert done.err.endswith("\n")
    for piece in pieces:
        assert piece in done.err

"""A thousand hostile calls, drawn from a seed: each ends in a documented way. `flood.py` has the tens of thousands."""

import contextlib
import io
import os
from pathlib import Path

import pytest

import cli
from tests.hostile.cases import Case, command_case, file_case
from tests.hostile.verdict import Ended, wrong_with
from twin.cli.delivery import end

CASES = {"commands": (command_case, 500), "files": (file_case, 500)}
SEED, IN_ONE_TEST = 2, 50


def ended(case: Case, folder: Path) -> Ended:
    """How a call in this process ends, in an empty folder."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = end(cli.twin, case.words)
    left = tuple(sorted(set(os.listdir(folder)) - set(case.files)))
    for name in os.listdir(folder):
        (folder / name).unlink()
    return Ended(code, out.getvalue(), err.getvalue(), left)


@pytest.mark.parametrize(
    ("kind", "first"), [(kind, first) for kind, (_, count) in CASES.items() for first in range(0, count, IN_ONE_TEST)]
)
def test_hostile_calls_end_in_a_documented_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, first: int
) -> None:
    monkeypatch.chdir(tmp_path)
    make, _ = CASES[kind]
    for number in range(first, first + IN_ONE_TEST):
        case = make(f"{SEED}/{kind}/{number}")
        wrong = wrong_with(ended(case, tmp_path), case.words)
        assert not wrong, f"{kind}/{number}: {case.words}: {wrong}"

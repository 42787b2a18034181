"""`twin machine` answers on any computer, with and without a card."""

import json

import pytest

from tests.cli.command import ANSWERED, run
from tests.cli.test_answers import asked

Capture = pytest.CaptureFixture[str]


def test_this_computer_is_shown_in_lines_and_in_one_document(capsys: Capture) -> None:
    done = run(capsys, "machine")
    assert (done.code, done.err) == (ANSWERED, "")
    assert {"gpu", "cpu", "host", "profile"} <= {line.split()[0] for line in done.out.splitlines()}
    found = asked(capsys, "machine")
    assert found["schema"] == "twin.machine/1"
    assert found["host_bytes"] > 0
    assert found["cpu"] in done.out
    json.dumps(found, allow_nan=False)

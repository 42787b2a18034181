"""A few runs stopped at random moments; `kills.py` has the hundreds."""

import pytest

from tests.hostile.kills import RUNS, stop_many


def test_a_stopped_run_leaves_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    counts = stop_many(9, 5, RUNS[:1])
    assert "defects" not in counts, capsys.readouterr().out
    assert sum(counts.values()) == 9

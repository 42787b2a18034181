"""Measuring cases: none is lost, what does not fit leaves those that share it out, rounds are judged together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.measure import UNSTEADY, Outcome, measure, measured_in_rounds
from calibrate.measurements import LeftOutRow, MeasuredRow, row_of
from calibrate.operations import timing
from calibrate.operations.table import Case
from calibrate.probes import CannotRun, WrongData
from tests.calibrate import probe_worlds as worlds
from tests.calibrate.call_worlds import FakeCall, FakeDevice

STEP = Case(operation="decode_step", at={"tier": "vram", "ctx_tokens": 6_145, "layers": 12})
LATER = replace(STEP, at={**STEP.at, "ctx_tokens": 12_288})
HOST = replace(STEP, at={**STEP.at, "tier": "host"})
SELECT = replace(STEP, operation="decode_select")
CODED = Case(operation="decode_format", at={"format": "q8_0", "ctx_tokens": 769, "batch": 3, "q_tokens": 2})
EVERY = (STEP, HOST, SELECT, LATER, CODED)

Refuse = Callable[[Case], None]


def accept(_case: Case) -> None:
    """Every case has room."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Outcome]]:
    """Measures cases; `opening` and `making` may refuse them."""

    def measured(
        *cases: Case, opening: Refuse = accept, making: Refuse = accept, error: float = 1e-4, told: Any = None
    ):  # type: ignore[no-untyped-def]
        @contextmanager
        def opened(_context: Any, pairs: Any) -> Iterator[None]:
            operation, point = pairs[0]
            opening(Case(operation=operation.name, at=dict(point)))
            yield

        def call(_context: Any, operation: Any, point: Any, _shared: Any) -> FakeCall:
            making(Case(operation=operation.name, at=dict(point)))
            return FakeCall(error=error)

        monkeypatch.setattr("calibrate.measure.settle", lambda _operations: None)
        monkeypatch.setattr(timing, "_opened", opened)
        monkeypatch.setattr(timing, "_call", call)
        progress = {} if told is None else {"progress": told.append}
        device: Any = FakeDevice()
        return list(measure(cases, device, worlds.machine(device="cpu"), group="grid", **progress))

    return measured


def test_every_case_is_a_row_with_its_samples(run: Callable[..., list[Outcome]]) -> None:
    told: list[Case] = []
    rows = run(*EVERY, told=told)
    assert {row.case.id for row in rows} == {case.id for case in EVERY}
    for row in rows:
        assert isinstance(row, MeasuredRow)
        assert (row.median_s, row.error, row.group, len(row.samples_s)) == (0.01, 1e-4, "grid", 30)
    assert [case.id for case in told] == [row.case.id for row in rows]  # told before each begins
    assert {row.case.id for row in rows[:3]} == {STEP.id, LATER.id, SELECT.id}  # over one cache
    assert run() == []


def test_planes_that_do_not_fit_leave_their_cases_out_with_the_reason(run: Callable[..., list[Outcome]]) -> None:
    def full(case: Case) -> None:
        if case.at["tier"] == "vram":
            raise RuntimeError("needs 9.00 GiB\nand more")

    outcomes = run(STEP, HOST, LATER, opening=full)
    left = [outcome for outcome in outcomes if isinstance(outcome, LeftOutRow)]
    assert left == [LeftOutRow(case=case, reason="needs 9.00 GiB") for case in (STEP, LATER)]
    assert [row.case for row in outcomes if isinstance(row, MeasuredRow)] == [HOST]


@pytest.mark.parametrize(
    ("error", "told"), [(MemoryError("16 GiB"), "16 GiB"), (MemoryError(), "MemoryError"), (CannotRun("no"), "no")]
)
def test_a_case_that_fails_leaves_out_itself_and_those_after_it(
    run: Callable[..., list[Outcome]], error: Exception, told: str
) -> None:
    def late(case: Case) -> None:
        if case.id == LATER.id:
            raise error

    first, second, other = run(STEP, LATER, CODED, making=late)
    assert isinstance(first, MeasuredRow)
    assert second == LeftOutRow(case=LATER, reason=told)
    assert isinstance(other, MeasuredRow)


def test_a_wrong_result_is_never_a_row(run: Callable[..., list[Outcome]]) -> None:
    with pytest.raises(WrongData, match=r"decode_step\.vram\.6145\.x12"):
        run(STEP, error=0.5)


# Rounds


def rounds_of(*rounds: list[Outcome]) -> Callable[[], Iterator[Outcome]]:
    """Each call gives the next round."""
    waiting = iter(rounds)
    return lambda: iter(next(waiting))


def row(case: Case, *seconds: float, error: float = 1e-4) -> MeasuredRow:
    return row_of(case, seconds, error=error, link_bytes=7, group="grid")


def test_a_case_is_the_repeats_of_all_its_rounds() -> None:
    (joined,) = measured_in_rounds(rounds_of([row(STEP, 1.0, 1.1)], [row(STEP, 1.0, 1.2, 1.2, error=1e-3)]), 2)
    assert joined == row(STEP, 1.0, 1.1, 1.0, 1.2, 1.2, error=1e-3)


def test_a_case_whose_rounds_disagree_is_told_apart_with_the_reason() -> None:
    first, again = [row(STEP, 1.0), row(HOST, 1.0)], [row(STEP, UNSTEADY + 0.05), row(HOST, UNSTEADY)]
    left, joined = measured_in_rounds(rounds_of(first, again), 2)
    assert isinstance(left, LeftOutRow)
    assert (joined.case, left.case) == (HOST, STEP)
    assert "too busy to tell: the case took 1.30 times as long in one of 2 rounds" in left.reason


def test_a_case_that_one_round_could_not_run_is_left_out_once_with_its_own_reason() -> None:
    left = LeftOutRow(case=STEP, reason="needs 9 GiB")
    assert measured_in_rounds(rounds_of([left, row(HOST, 1.0)], [left, row(HOST, 1.0)]), 2)[1:] == [left]
    assert measured_in_rounds(rounds_of([row(STEP, 1.0)], [left]), 2) == [left]

"""Measuring: fresh data before every repeat, a wrong result never returned as a time, no case lost."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.kernel_cases import KernelCase
from calibrate.measure import (
    LEAST_REPEATS,
    MOST_REPEATS,
    WORST_ERROR,
    LeftOut,
    Measurement,
    WrongResult,
    measure,
)
from tests.calibrate.measure_worlds import FakeBackend, install_fakes

pytest.importorskip("torch")

STEP = KernelCase(metric="decode_step", tier="vram", ctx_tokens=6_145)
SELECT = replace(STEP, metric="decode_select")
GATHER = replace(STEP, metric="decode_gather")
CHUNK = KernelCase(metric="prefill_attention", tier="vram", ctx_tokens=12_288, rows=96)
ROWS = replace(CHUNK, metric="prefill_select")
STAGED = replace(CHUNK, tier="host", mode="staged", bucket_tokens=6_144)
EVERY = (STEP, SELECT, GATHER, CHUNK, ROWS, STAGED)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fakes(monkeypatch)


def ids(case: KernelCase) -> str:
    return case.id


def only(case: KernelCase, backend: Any) -> Measurement:
    (outcome,) = measure([case], backend)
    assert isinstance(outcome, Measurement)
    return outcome


@pytest.mark.parametrize("case", EVERY, ids=ids)
def test_a_right_result_is_returned_with_its_samples(case: KernelCase) -> None:
    measured = only(case, FakeBackend(seconds_of=lambda repeat: 0.04 + 0.001 * repeat))
    assert measured.case == case
    assert measured.samples_s == pytest.approx([0.04 + 0.001 * repeat for repeat in range(6)])
    assert measured.median_s == pytest.approx(0.0425)
    assert measured.spread == pytest.approx(0.0035 / 1.349 / 0.0425)
    assert measured.error == 1e-4


@pytest.mark.parametrize(
    ("once_s", "repeats"), [(1e-9, MOST_REPEATS), (0.01, 25), (0.1, LEAST_REPEATS), (60.0, LEAST_REPEATS)]
)
def test_short_cases_are_repeated_more_often(once_s: float, repeats: int) -> None:
    assert len(only(STEP, FakeBackend(seconds_of=lambda _repeat: once_s)).samples_s) == repeats


def test_rounds_share_the_repeats() -> None:
    backend = FakeBackend(seconds_of=lambda _repeat: 1e-9)
    backend.rounds = 3
    assert len(only(STEP, backend).samples_s) == MOST_REPEATS // 3


@pytest.mark.parametrize("case", EVERY, ids=ids)
def test_every_repeat_of_a_decode_case_has_data_of_its_own(case: KernelCase) -> None:
    """A chunk's selection is not made anew before each repeat: it takes longer than what is timed."""
    backend = FakeBackend(seconds_of=lambda _repeat: 1.0)
    only(case, backend)
    assert [what for what, _ in backend.timed] == [case.metric] * LEAST_REPEATS
    assert len({data for _, data in backend.timed}) == (1 if case in {CHUNK, ROWS, STAGED} else LEAST_REPEATS)


@pytest.mark.parametrize("case", EVERY, ids=ids)
@pytest.mark.parametrize("error", [WORST_ERROR * 1.01, 1.0, math.inf, math.nan])
def test_a_wrong_result_is_never_returned_as_a_time(case: KernelCase, error: float) -> None:
    backend = FakeBackend(error=error)
    outcomes = measure([case], backend)
    with pytest.raises(WrongResult, match=case.id.replace(".", r"\.")):
        next(outcomes)
    assert list(outcomes) == []
    assert backend.closed == len(backend.opened) == 1


@pytest.mark.parametrize("case", EVERY, ids=ids)
def test_a_case_that_does_nothing_once_captured_is_noticed(case: KernelCase) -> None:
    class CapturesNothing(FakeBackend):
        def capture(self, work: Any) -> Any:
            del work
            return lambda: None

    with pytest.raises(WrongResult):
        only(case, CapturesNothing())


def test_link_bytes_are_those_of_the_chunk() -> None:
    assert only(STAGED, FakeBackend()).link_bytes == 61_440
    assert only(STEP, FakeBackend()).link_bytes == 0


def test_planes_that_do_not_fit_leave_their_group_out_with_the_reason() -> None:
    refusal = RuntimeError("the offload tier needs 9.00 GiB of disk\nand more")
    host = [replace(STEP, tier="host"), replace(GATHER, tier="host")]
    backend = FakeBackend(refusals={"host": refusal})
    outcomes = list(measure([STEP, *host, SELECT], backend))
    left = [outcome for outcome in outcomes if isinstance(outcome, LeftOut)]
    assert [outcome.case for outcome in left] == host
    assert {outcome.reason for outcome in left} == {"the offload tier needs 9.00 GiB of disk"}
    assert [outcome.case for outcome in outcomes if isinstance(outcome, Measurement)] == [STEP, SELECT]


def test_a_memory_error_leaves_the_group_out_too() -> None:
    (outcome,) = measure([STEP], FakeBackend(refusals={"vram": MemoryError("16 GiB")}))
    assert outcome == LeftOut(case=STEP, reason="16 GiB")


def test_a_memory_error_without_a_message_leaves_the_group_out_too() -> None:
    (outcome,) = measure([STEP], FakeBackend(refusals={"vram": MemoryError()}))
    assert isinstance(outcome, LeftOut)
    assert outcome.reason


def test_a_case_that_fails_leaves_out_itself_and_those_after_it() -> None:
    late = [replace(STEP, ctx_tokens=ctx) for ctx in (12_288, 49_153)]
    backend = FakeBackend()
    backend.fails_at = 12_288
    outcomes = list(measure([STEP, *late], backend))
    assert isinstance(outcomes[0], Measurement)
    assert outcomes[1:] == [LeftOut(case=case, reason="out of memory") for case in late]
    assert backend.closed == len(backend.opened)


def test_groups_share_planes_that_hold_their_longest_case() -> None:
    cases = [
        STEP,
        replace(GATHER, ctx_tokens=49_153),
        replace(STEP, tier="host", layers=2),
        replace(GATHER, tier="host", huge_pages=False),
        CHUNK,
        ROWS,
        STAGED,
    ]
    backend = FakeBackend()
    outcomes = list(measure(cases, backend))
    assert {outcome.case for outcome in outcomes} == set(cases)
    assert len(outcomes) == len(cases)
    wanted = [
        {"layers": 12, "tokens": 49_408, "tier": "vram", "huge_pages": True},
        {"layers": 2, "tokens": 6_400, "tier": "host", "huge_pages": True},
        {"layers": 12, "tokens": 6_400, "tier": "host", "huge_pages": False},
        {"layers": 1, "tokens": 12_288, "tier": "vram", "huge_pages": True},
        {"layers": 1, "tokens": 12_288, "tier": "host", "huge_pages": True},
    ]
    assert sorted(backend.opened, key=str) == sorted(wanted, key=str)
    assert backend.closed == len(wanted)


def test_a_step_of_few_layers_is_not_run_on_planes_of_more() -> None:
    backend = FakeBackend()
    list(measure([STEP, replace(STEP, layers=2)], backend))
    assert sorted(asked["layers"] for asked in backend.opened) == [2, 12]


def test_progress_is_told_of_every_case_before_it_begins() -> None:
    told: list[KernelCase] = []
    outcomes = []
    for outcome in measure(EVERY, FakeBackend(), progress=told.append):
        assert told[-1] == outcome.case
        outcomes.append(outcome)
    assert len(told) == len(outcomes) == len(EVERY)


def test_nothing_to_measure_is_nothing() -> None:
    assert list(measure([], FakeBackend())) == []

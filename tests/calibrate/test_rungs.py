"""Spreads of borrowed rates: what was put into made-up misses is found again, and what is left out is really away."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from calibrate.means import FEWEST, LEAST, Z90, Shelf, widened
from calibrate.published.curves import KernelRow
from calibrate.rungs import (
    BY_ENGINE,
    BY_MACHINE,
    LEARNING,
    Leaving,
    Missed,
    likeliest,
    missed_kernels,
    missed_steps,
    of_kernels,
    whole,
    without_engine,
    without_machine,
)
from hwprofiles import load_profile
from tests.worlds import curve, kernel
from twin.operations.ops import Op

KEY = "linear/a/bf16"
AMPERE, ADA = "rtx3090", "rtx4090"
SHELF: Shelf = {
    AMPERE: {KEY: kernel(latency_s=0.1), "linear/a_fast/bf16": kernel(latency_s=0.1)},
    ADA: {KEY: kernel(latency_s=0.2), "linear/b/bf16": kernel(latency_s=0.4)},
}


def row(machine: str, seconds: float, key: str = KEY) -> KernelRow:
    """A call that has nothing to do but to be launched, on a machine that knows how long it takes."""
    there = replace(load_profile(machine), kernels={key: SHELF[machine][key]})
    return KernelRow("row", "curve", "file", "engine", there, Op("x", 0, kernel=key), seconds)


def miss(log: float, name: str, *, deviation: float = 0.0, **shares: float) -> Missed:
    return Missed(log, shares, 0.0, deviation, "", name, name, "engine")


@pytest.mark.parametrize(
    ("leaving", "left"),
    [
        (BY_MACHINE, {AMPERE: 0.2, ADA: 0.1}),  # what the other machine has
        (BY_ENGINE, {AMPERE: 0.4, ADA: 0.4}),  # what the other engine has, on whichever machine
    ],
)
def test_a_row_is_told_by_what_is_left(leaving: Leaving, left: dict[str, float]) -> None:
    found = missed_steps([row(name, 0.1) for name in left], SHELF, leaving, LEARNING)
    assert [math.exp(each.log) for each in found] == pytest.approx([seconds / 0.1 for seconds in left.values()])
    for each in found:
        assert each.shares == {"latencies": pytest.approx(1)}
        assert (each.what, each.known) == ("linear, decode", 0)


def test_a_row_of_which_nothing_is_left_is_not_told() -> None:
    only = {AMPERE: {KEY: kernel(latency_s=0.1)}}
    assert missed_steps([row(AMPERE, 0.1)], only, BY_MACHINE, LEARNING) == []
    assert missed_steps([row(AMPERE, 0.1)], only, BY_ENGINE, LEARNING) == []


def test_leaving_out_takes_a_machine_or_an_engine_under_all_its_names() -> None:
    assert without_machine(SHELF, AMPERE) == {ADA: SHELF[ADA]}
    left = without_engine(SHELF, "a")
    assert {name: list(own) for name, own in left.items()} == {AMPERE: [], ADA: ["linear/b/bf16"]}
    assert KEY in SHELF[AMPERE]


def test_misses_give_back_the_spreads_that_made_them() -> None:
    """Forty machines of ten steps; products are off by 0.1 on each, attention by 0.3."""
    drawn = np.random.default_rng(1)
    missed = []
    for number in range(40):
        products, attention = drawn.normal(0, 0.1), drawn.normal(0, 0.3)
        for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            log = share * products + (1 - share) * attention
            missed.append(miss(log, f"machine {number}", products=share, attention=1 - share))
    found = likeliest(missed)
    assert found["products"].spread == pytest.approx(0.1, rel=0.3)
    assert found["attention"].spread == pytest.approx(0.3, rel=0.3)
    assert (found["products"].machines, found["products"].n) == (40, 400)
    assert 0.85 <= found["attention"].coverage <= 1


def test_a_machine_of_many_rows_counts_as_one_of_few() -> None:
    logs = dict(zip("abcdefgh", (0.1, -0.1, 0.1, -0.1, 0.4, -0.4, 0.4, -0.4), strict=True))
    even = [miss(log, name, products=1.0) for name, log in logs.items()]
    crowded = even + [miss(logs["a"], "a", products=1.0)] * 99
    assert likeliest(crowded)["products"].spread == pytest.approx(likeliest(even)["products"].spread, rel=1e-3)


def test_a_group_that_too_few_tell_of_is_not_learned_from_steps() -> None:
    few = [miss(0.1, str(number), products=1.0) for number in range(FEWEST - 1)]
    assert likeliest(few) == {}
    hardly = [miss(0.1, str(number), products=1.0, reads=0.05) for number in range(FEWEST)]
    assert likeliest(hardly).keys() == {"products"}


def test_kernels_are_held_against_what_others_have() -> None:
    machines, engines = (missed_kernels(SHELF, leaving)["products"] for leaving in (BY_MACHINE, BY_ENGINE))
    assert {each.left_out: math.exp(each.log) for each in machines} == pytest.approx({AMPERE: 2, ADA: 0.5})
    told = {(each.left_out, each.machine): math.exp(each.log) for each in engines}
    mean = math.sqrt(math.sqrt(0.1 * 0.2) * 0.1)  # over the two names of the other engine
    assert told == pytest.approx(
        {
            ("a", AMPERE): 4,
            ("a", ADA): 2,
            ("a_fast", AMPERE): math.sqrt(math.sqrt(0.02) * 0.4) / 0.1,
            ("b", ADA): mean / 0.4,
        },
        rel=1e-3,
    )


def test_a_share_is_held_against_others_at_its_own_places() -> None:
    shelf = {
        AMPERE: {KEY: kernel(efficiency=curve((1, 64), (0.2, 0.4)), latency_s=1)},
        ADA: {KEY: kernel(efficiency=curve((1,), (0.4,)), latency_s=2)},
    }
    told = [math.exp(each.log) for each in missed_kernels(shelf, BY_MACHINE)["products"] if each.left_out == AMPERE]
    assert told == pytest.approx([2, 1])


def test_spreads_of_kernels_are_root_mean_squares_with_machines_counting_alike() -> None:
    """One machine is 0.1 off in nine kernels, one 0.3 in one: the root of 0.05, of two."""
    missed = {"products": [miss(0.1, "one")] * 9 + [miss(-0.3, "other")], "reads": [miss(0.001, "one")] * 3}
    found = of_kernels(missed)
    assert found["products"].spread == pytest.approx(min(0.8, math.sqrt(0.05) * widened(2)), abs=1e-4)
    assert found["reads"].spread == LEAST
    assert (found["products"].n, found["products"].machines) == (10, 2)
    assert found["states"].n == 13  # nothing of them was left out: as all are


def test_whole_steps_have_a_spread_of_their_own_until_those_of_nine_machines_in_ten_are_held() -> None:
    """One of nine is 0.15 off: nothing more is needed for the ten, and for the nine the root of 0.15^2 - 0.1^2."""
    missed = [miss(0.1, str(number), deviation=0.101 / Z90) for number in range(9)]
    far = miss(0.15, "far", deviation=0.1 / Z90)
    assert whole([*missed, far, far]).spread == LEAST
    assert whole([*missed[:8], far]).spread == pytest.approx(math.sqrt(0.15**2 - 0.1**2) / Z90, abs=0.01)

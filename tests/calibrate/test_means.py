"""Means over machines and over engines, and how far one machine is from what the others say, on paper."""

import math

import pytest
from msgspec.structs import replace

from calibrate.means import LEAST, WIDEST, Shelf, Spreads, averaged, ladder_of, widened
from hwprofiles.ladder import shipped_ladder
from hwprofiles.profile import LEAST_LATENCY_S, Kernel
from hwprofiles.rates import Curve
from hwprofiles.store import shipped_kernels
from tests.worlds import curve, kernel, learned, operations, rate

KEY = "linear/a/bf16"
NOBODY = Spreads({}, {}, learned(0.0))
AMPERE, ADA, HOPPER, APPLE = "rtx3090", "rtx4090", "h200", "m1-max"
T_OF_TWO = 2.91999
"""95 % point of Student's t with 2 degrees of freedom, as tables have it; that of the normal is 1.64485."""


def latencies(*seconds: float, machines: tuple[str, ...] = (AMPERE, ADA, HOPPER), key: str = KEY) -> Shelf:
    return {name: {key: kernel(latency_s=each)} for name, each in zip(machines, seconds, strict=True)}


def latency_s(own: Kernel | None) -> float:
    assert own is not None
    assert own.latency is not None
    return own.latency.value


def share(own: Kernel) -> Curve:
    assert own.efficiency is not None
    return own.efficiency


def test_a_mean_is_of_logarithms_and_over_those_that_have_the_rate() -> None:
    """The root of 1 x 4 is 2, and of 0.2 x 0.8 is 0.4."""
    one, other = kernel(efficiency=curve(efficiency=(0.2,)), latency_s=1), kernel(efficiency=curve(efficiency=(0.8,)))
    counted = replace(kernel(latency_s=4), operations=operations(3), combine=rate(0.5, "1"))
    mean = averaged([one, other, counted], "of three")
    assert (latency_s(mean), share(mean).efficiency, mean.operations) == (2, (0.4,), counted.operations)
    assert mean.combine is not None
    assert (mean.combine.value, mean.combine.note, share(mean).n) == (0.5, "of three", 2)


def test_a_mean_of_curves_has_the_places_of_all_and_holds_their_ends() -> None:
    rising, flat = curve((1, 100), (0.1, 0.9)), curve((10,), (0.1,))
    mean = share(averaged([kernel(efficiency=rising), kernel(efficiency=flat)], ""))
    assert mean.at == (1, 10, 100)
    assert mean.efficiency == pytest.approx((0.1, math.sqrt(0.5 * 0.1), 0.3), rel=1e-3)
    elsewhere = kernel(efficiency=curve((5,), (0.9,), over="rows"))
    assert share(averaged([kernel(efficiency=rising), elsewhere], "")) == replace(rising, spread=0.0, n=1)


def test_a_mean_forgets_how_well_one_machine_knew_its_share_with_its_roof() -> None:
    known = replace(curve((1, 8), (0.5, 0.5)), spreads=(0.02, 0.02))
    assert not share(averaged([kernel(efficiency=known), kernel(efficiency=curve((4,), (0.5,)))], "")).spreads


def test_few_values_are_widened_as_students_distribution_says() -> None:
    assert widened(3) == pytest.approx(T_OF_TWO / 1.64485, rel=1e-4)
    assert widened(1) == widened(2) > widened(3) > widened(30) > 1


def test_three_machines_say_how_far_one_is_from_what_the_others_have() -> None:
    """1, 1.1 and 1.21 s: the outer ones are 1.1^1.5 off, the middle one not at all."""
    rms = math.sqrt(2 / 3) * 1.5 * math.log(1.1)
    own = ladder_of(latencies(1, 1.1, 1.21), NOBODY).carried[KEY]["any"]
    assert own.kernel.latency is not None
    assert own.kernel.latency.spread == pytest.approx(rms * T_OF_TWO / 1.64485, abs=2e-3)
    assert (own.of_group, own.machines, latency_s(own.kernel)) == (False, (HOPPER, AMPERE, ADA), 1.1)
    alike, apart = (
        ladder_of(latencies(*own), NOBODY).carried[KEY]["any"].kernel.latency for own in ((1, 1, 1), (1, 9, 81))
    )
    assert alike is not None
    assert apart is not None
    assert (alike.spread, apart.spread) == (LEAST, WIDEST)


def test_shares_are_off_at_each_place_by_themselves_and_with_their_roof() -> None:
    shares = (0.1, 0.11, 0.121)
    shelf = {
        name: {KEY: kernel(efficiency=curve((1, 64), (own, 0.5)))}
        for name, own in zip((AMPERE, ADA, HOPPER), shares, strict=True)
    }
    own = share(ladder_of(shelf, NOBODY).carried[KEY]["any"].kernel)
    assert own.spread_with_roof(1) == own.spread == pytest.approx(0.207, abs=2e-3)
    assert own.spread_with_roof(64) == LEAST


def test_a_rate_that_one_machine_alone_has_is_as_uncertain_as_any() -> None:
    shelf = dict(latencies(1, 1, 1))
    shelf[AMPERE] = {KEY: kernel(efficiency=curve(), latency_s=1)}
    assert share(ladder_of(shelf, NOBODY).carried[KEY]["any"].kernel).spread == WIDEST


@pytest.mark.parametrize(("machines", "by_group"), [((AMPERE, ADA), False), ((AMPERE, ADA, HOPPER), True)])
def test_a_kernel_of_few_machines_is_off_as_its_group_is(machines: tuple[str, ...], by_group: bool) -> None:
    shelf = latencies(*(1.0 for _ in machines), machines=machines)
    own = ladder_of(shelf, NOBODY._replace(by_group=by_group)).carried[KEY]["any"]
    assert own.of_group
    assert own.kernel.latency is not None
    assert own.kernel.latency.spread == 0


def test_a_likeness_stands_apart_where_its_machines_are_not_all_there_are() -> None:
    alone = ladder_of(latencies(1, 2, machines=(AMPERE, ADA)), NOBODY).carried[KEY]
    assert {each: own.machines for each, own in alone.items()} == {
        "8.6": (AMPERE,), "8.9": (ADA,), "any": (AMPERE, ADA)
    }  # fmt: skip
    mixed = ladder_of(latencies(1, 4, 9, machines=(AMPERE, ADA, APPLE)), NOBODY).carried[KEY]
    assert {each: latency_s(own.kernel) for each, own in mixed.items()} == {
        "8.6": 1, "8.9": 4, "cuda": 2, "unified": 9, "any": pytest.approx(36 ** (1 / 3), rel=1e-3)
    }  # fmt: skip
    assert list(ladder_of(latencies(1, machines=(AMPERE,)), NOBODY).carried[KEY]) == ["any"]


def test_a_kernel_that_says_that_other_rates_hold_it_is_lent_to_nobody() -> None:
    shelf = {AMPERE: {KEY: kernel(latency_s=LEAST_LATENCY_S), "append/a/fp16": kernel(latency_s=1)}}
    made = ladder_of(shelf, NOBODY)
    assert list(made.carried) == ["append/a/fp16"]
    assert list(made.typical) == ["append"]
    with_share = {AMPERE: {KEY: kernel(efficiency=curve(), latency_s=LEAST_LATENCY_S)}}
    assert list(ladder_of(with_share, NOBODY).carried) == [KEY]


def test_typical_is_the_mean_over_engines_however_many_machines_each_has_and_of_devices_with_cuda_alone() -> None:
    """Engine a has 1 and 4 s, so 2; b has 8: together 4. What a processor of another kind has is left out."""
    shelf = {
        AMPERE: {KEY: kernel(latency_s=1)},
        ADA: {KEY: kernel(latency_s=4), "linear/b/bf16": kernel(latency_s=8), "linear/b/q4_k": kernel(latency_s=7)},
        APPLE: {"linear/c/bf16": kernel(latency_s=1)},
    }
    (own,) = ladder_of(shelf, NOBODY).typical.values()
    assert (latency_s(own.plain), latency_s(own.quantised)) == (4, 7)


def test_what_is_shipped_is_lent_as_it_is_shipped() -> None:
    shipped = shipped_ladder()
    spreads = Spreads(shipped.carried_spreads, shipped.typical_spreads, shipped.whole)
    assert ladder_of(shipped_kernels(), spreads) == replace(shipped, judged=())

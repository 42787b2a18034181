"""Rates that a machine lacks: carried from the likest devices, else typical of the operation, else none."""

from typing import get_args

import pytest
from msgspec.structs import replace

from hwprofiles.ladder import (
    ANY,
    GROUP_OF,
    GROUPS,
    RUNGS,
    SCHEMA,
    STAND_INS,
    Borrowed,
    Carried,
    Ladder,
    Rung,
    Typical,
    borrowed,
    kind_of,
    likenesses,
    shipped_ladder,
)
from hwprofiles.profile import HardwareProfile, Kernel
from tests.worlds import curve, kernel, learned, machine

KEY = "linear/a/bf16"
STATES = GROUPS["states"]


CARRIED_SPREADS, TYPICAL_SPREADS = (dict.fromkeys(GROUPS, learned(spread)) for spread in (0.2, 0.4))


def ladder(carried: dict[str, dict[str, Carried]] | None = None, typical: dict[str, Typical] | None = None) -> Ladder:
    spreads = {"carried_spreads": CARRIED_SPREADS, "typical_spreads": TYPICAL_SPREADS}
    return Ladder(schema=SCHEMA, carried=carried or {}, typical=typical or {}, whole=learned(0.0), **spreads)


def lent(latency_s: float, *, of_group: bool = True) -> Carried:
    return Carried(kernel=kernel(latency_s=latency_s), machines=("other",), of_group=of_group)


def device(capability: str = "8.6", *, unified: bool = False) -> HardwareProfile:
    toy = machine()
    return replace(toy, gpu=replace(toy.gpu, compute_capability=capability, unified_memory=unified))


def found(key: str, there: Ladder, profile: HardwareProfile | None = None) -> Borrowed:
    lends = borrowed(profile or machine(), key, there)
    assert lends is not None
    return lends


def latency_s(own: Kernel) -> float:
    assert own.latency is not None
    return own.latency.value


@pytest.mark.parametrize(
    ("profile", "kind", "order"),
    [
        (device("8.6"), "cuda", ("8.6", "cuda", ANY)),
        (device("0.0"), "cpu", ("cpu", ANY)),
        (device("0.1", unified=True), "unified", ("unified", ANY)),
        (device("0.1"), "other", ("other", ANY)),
    ],
)
def test_the_likest_devices_come_first(profile: HardwareProfile, kind: str, order: tuple[str, ...]) -> None:
    assert (kind_of(profile.gpu), likenesses(profile.gpu)) == (kind, order)


@pytest.mark.parametrize(("capability", "seconds"), [("8.6", 1), ("9.0", 2), ("0.1", 3), ("0.0", 3)])
def test_a_kernel_is_carried_from_the_likest_devices_that_have_it(capability: str, seconds: float) -> None:
    there = ladder({KEY: {"8.6": lent(1), "cuda": lent(2), ANY: lent(3)}})
    lends = found(KEY, there, device(capability))
    assert (latency_s(lends.kernel), lends.rung, lends.group) == (seconds, "carried", "products")


def test_what_other_machines_have_of_a_kernel_comes_before_what_is_typical_of_its_operation() -> None:
    there = ladder({KEY: {ANY: lent(1)}}, {"linear": Typical(plain=kernel(latency_s=2))})
    carried, typical = found(KEY, there), found("linear/b/bf16", there)
    assert (latency_s(carried.kernel), carried.rung, carried.spreads) == (1, "carried", CARRIED_SPREADS)
    assert (latency_s(typical.kernel), typical.rung, typical.spreads) == (2, "typical", TYPICAL_SPREADS)


def test_a_kernel_that_enough_machines_tell_of_is_off_as_its_own_rates_say() -> None:
    assert found(KEY, ladder({KEY: {ANY: lent(1, of_group=False)}})).spreads == {}


@pytest.mark.parametrize(("operation", "other"), [*STAND_INS.items(), *((each, "recurrent") for each in STATES)])
def test_an_operation_without_kernels_anywhere_stands_on_another_and_else_on_its_own(
    operation: str, other: str
) -> None:
    stand_in, own = Typical(plain=kernel(latency_s=1)), Typical(plain=kernel(latency_s=2))
    alone = found(f"{operation}/a/bf16", ladder(typical={other: stand_in}))
    both = found(f"{operation}/a/bf16", ladder(typical={other: stand_in, operation: own}))
    assert (latency_s(alone.kernel), latency_s(both.kernel)) == (1, 2)
    assert alone.group == GROUP_OF[operation]


def test_a_curve_over_another_quantity_than_the_operations_is_its_middle() -> None:
    """The root of 0.1 x 0.4 is 0.2."""
    over_ctx = Typical(plain=kernel(efficiency=curve((1000, 100_000), (0.1, 0.4), over="ctx_tokens")))
    there = ladder(typical={"score": over_ctx})
    as_it_is, middle = (found(f"{name}/a/bf16", there).kernel.efficiency for name in ("score", "index_tokens"))
    assert as_it_is is not None
    assert middle is not None
    assert (as_it_is.over, as_it_is.at, as_it_is.efficiency) == ("ctx_tokens", (1000, 100_000), (0.1, 0.4))
    assert (middle.over, middle.at, middle.efficiency) == ("tokens", (1,), (pytest.approx(0.2),))


@pytest.mark.parametrize(("fmt", "seconds"), [("bf16", 1), ("fp32", 1), ("q4_k", 2), ("fp8", 2)])
def test_formats_that_are_multiplied_as_they_are_stored_stand_apart_from_others(fmt: str, seconds: float) -> None:
    plain, quantised = kernel(latency_s=1), kernel(latency_s=2)
    key = f"linear/a/{fmt}"
    assert (
        latency_s(found(key, ladder(typical={"linear": Typical(plain=plain, quantised=quantised)})).kernel) == seconds
    )
    for only, there in ((1, Typical(plain=plain)), (2, Typical(quantised=quantised))):
        assert latency_s(found(key, ladder(typical={"linear": there})).kernel) == only


def test_nothing_is_lent_of_an_operation_that_is_unknown_or_that_nobody_runs() -> None:
    everything = ladder({KEY: {ANY: lent(1)}}, {"linear": Typical(plain=kernel(latency_s=1))})
    assert borrowed(machine(), "pray/a/bf16", everything) is None
    assert borrowed(machine(), "scan/a/bf16", everything) is None
    assert borrowed(machine(), "linear/b/bf16", ladder(typical={"linear": Typical()})) is None


def test_the_shipped_ladder_lends_to_any_device_and_says_of_every_group_how_far_that_is_off() -> None:
    shipped = shipped_ladder()
    assert get_args(Rung) == RUNGS
    for group, operations in GROUPS.items():
        assert {*operations} == {each for each, of in GROUP_OF.items() if of == group}
        assert 0 < shipped.carried_spreads[group].spread <= shipped.typical_spreads[group].spread
    assert all(ANY in own for own in shipped.carried.values())
    for likeness in {each for own in shipped.carried.values() for each in own}:
        assert likeness in {"cuda", "cpu", "unified", "other", ANY} or likeness[0].isdigit()

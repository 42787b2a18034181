"""Seconds of single ops on a machine of 1 GB/s and 1 TFLOP/s with links of 1 ms latency."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles.ladder import ANY, SCHEMA, Carried, Ladder
from hwprofiles.profile import Kernel, Roof
from hwprofiles.rates import Rate
from tests import worlds
from tests.worlds import LINEAR, at_its_roof, curve, kernel, learned, link, machine, rate
from twin.cost.roofline import WALLS, Roofs
from twin.errors import MissingRate
from twin.operations.occupancy import BEGUN_TILES, FlashGrid, SplitKV
from twin.operations.ops import Engine, Op

KEY = LINEAR[0]
FLASH = "attend_dense/a/b"


def op(engine: Engine = Engine.SM, **counts: Any) -> Op:
    return Op(part="x", engine=engine, device=0, **counts)


def roofs(**changes: Any) -> Roofs:
    return Roofs(machine(**changes))


@pytest.mark.parametrize(
    ("counts", "seconds", "wall"),
    [
        ({"vram_bytes": 3e9, "flops": 2e12}, 3, "vram"),
        ({"vram_bytes": 2e9, "flops": 3e12}, 3, "tensor"),
        ({"vram_bytes": 1e9, "flops": 1e12, "link_bytes": 5e9}, 5, "h2d"),
        ({"vram_bytes": 6e9, "link_bytes": 5e9}, 6, "vram"),
        ({"flops": 2.5e12}, 2.5, "tensor"),
        ({}, 0, "vram"),
    ],
)
def test_a_kernel_takes_as_long_as_its_slowest_roof(counts: dict[str, float], seconds: float, wall: str) -> None:
    cost = roofs().cost(op(kernel=KEY, **counts))
    assert (cost.seconds, cost.latency_s, cost.bound_s, cost.wall) == (seconds, 0, seconds, wall)
    assert (cost.sol_s, cost.floor_s) == (seconds, seconds / worlds.PEAK)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("engine", [Engine.H2D, Engine.D2H, Engine.HOST, Engine.DISK])
def test_a_plain_copy_takes_the_latency_and_the_rate_of_its_link_a_call(engine: Engine, calls: int) -> None:
    wall = {Engine.H2D: "h2d", Engine.D2H: "d2h", Engine.HOST: "dram", Engine.DISK: "disk"}[engine]
    moved = "link_bytes" if wall.endswith(("2d", "2h")) else "host_bytes"
    cost = roofs().cost(op(engine, calls=calls, **{moved: 2e9}))
    assert cost.seconds == pytest.approx(calls * (2 + worlds.LATENCY_S))
    assert (cost.bound_s, cost.latency_s, cost.floor_s) == (
        2 * calls,
        worlds.LATENCY_S * calls,
        2 * calls / worlds.PEAK,
    )
    assert (cost.wall, cost.bound_rates, cost.latency_rates) == (wall, (wall,), (f"{wall}.latency",))


def test_an_efficiency_stretches_the_roof_but_not_the_latency_which_stands_in_for_a_links() -> None:
    own = kernel(efficiency=curve(efficiency=(0.25,)), latency_s=0.5)
    cost = roofs(kernels={KEY: own}).cost(op(kernel=KEY, vram_bytes=1e9))
    assert (cost.seconds, cost.latency_s, cost.bound_s, cost.sol_s) == (4.5, 0.5, 4, 1)
    assert cost.bound_rates == ("vram", f"{KEY}#efficiency")
    copy = roofs(kernels={KEY: kernel(latency_s=0.25)}).cost(op(Engine.H2D, kernel=KEY, link_bytes=1e9))
    assert (copy.latency_s, copy.bound_s, copy.latency_rates) == (0.25, 1, (f"{KEY}#latency",))


def test_a_share_that_was_measured_with_its_roof_hangs_on_both_as_one_where_it_was() -> None:
    shares = replace(curve((1, 8, 64), (0.5, 0.5, 0.5)), spread=0.3, spreads=(0.02, 0.02, None))
    found = roofs(kernels={KEY: kernel(efficiency=shares)})
    (together,) = found.cost(op(kernel=KEY, vram_bytes=1e9, grain=4)).bound_rates
    assert (found.rates[together].spread, together.partition("#")[0]) == (0.02, KEY)
    apart = found.cost(op(kernel=KEY, vram_bytes=1e9, grain=64)).bound_rates
    assert apart == ("vram", f"{KEY}#efficiency")
    assert found.rates[apart[1]].spread == 0.3


def test_efficiencies_are_read_at_an_ops_grain_and_a_links_at_its_runs_and_told_where_they_are_extrapolated() -> None:
    found = roofs(
        kernels={KEY: kernel(efficiency=curve((1, 100), (0.1, 0.5)))},
        h2d=worlds.link(run_length=curve((100, 1000), (0.25, 1), over="run_bytes")),
    )
    seconds = [found.cost(op(kernel=KEY, vram_bytes=1e9, grain=grain)).seconds for grain in (1, 10, 100)]
    assert seconds == pytest.approx([10, 1 / 0.3, 2])
    cost = found.cost(op(Engine.H2D, link_bytes=1e9, run_bytes=100))
    assert (cost.bound_s, cost.sol_s, cost.bound_rates) == (4, 1, ("h2d", "h2d.run_length"))
    assert [found.cost(op(Engine.H2D, link_bytes=1e9, run_bytes=run)).bound_s for run in (0, 5000)] == [1, 1]
    assert not found.extrapolated
    found.cost(op(kernel=KEY, vram_bytes=1e9, grain=101))
    found.cost(op(Engine.H2D, link_bytes=1e9, run_bytes=50))
    assert found.extrapolated == {f"{KEY} at 101 tokens", "h2d at runs of 50 B"}


def test_a_plain_read_stands_in_for_a_kernel_that_may_lack_a_rate_and_holds_what_short_runs_cost() -> None:
    key = "rows_disk/a/b"
    read = op(Engine.H2D, kernel=key, link_bytes=1e9, run_bytes=100, or_plain=True)
    short, own = link(run_length=curve((100, 1000), (0.25, 1), over="run_bytes")), kernel(latency_s=0.5)
    plain = roofs(h2d=short).cost(read)
    assert plain == roofs(h2d=short).cost(replace(read, kernel="", or_plain=False))
    assert plain.bound_s == 4
    rated = roofs(h2d=short, kernels={key: replace(own, efficiency=curve(efficiency=(0.1,)))}).cost(read)
    assert (rated.latency_s, rated.bound_s, rated.sol_s) == (0.5, pytest.approx(10), 1)
    assert (rated.bound_rates, rated.latency_rates) == (("h2d", f"{key}#efficiency"), (f"{key}#latency",))


@pytest.mark.parametrize("key", worlds.KERNELS)
def test_a_missing_kernel_is_named_beside_those_of_the_same_operation(key: str) -> None:
    operation = key.split("/", maxsplit=1)[0]
    other = f"{operation}/other/fp16"
    for kernels, hint in (({}, f"none of {operation}"), ({other: at_its_roof(other)}, f"it has {other}")):
        bare = machine(kernels=kernels)
        del bare.kernels[key]
        with pytest.raises(MissingRate, match=f"machine toy has no rate for {key}") as missing:
            Roofs(bare).cost(op(kernel=key, vram_bytes=1))
        assert hint in missing.value.hint


def test_a_missing_rate_of_products_or_instructions_is_named() -> None:
    with pytest.raises(MissingRate, match="machine toy has no fp8 tensor rate"):
        roofs().cost(op(flops=1, dtype="fp8"))
    bare = roofs(kernels={KEY: replace(at_its_roof(KEY), operations=worlds.operations(4))})
    with pytest.raises(MissingRate, match="no rate of instructions"):
        bare.cost(op(kernel=KEY, vram_bytes=1, dequantised_elements=1, split_kv=split_kv(elements=9)))


def in_waves(held: tuple[float, ...], efficiency: tuple[float, ...], **rates: Rate) -> Roofs:
    by_waves = kernel(efficiency=curve(over="resident_programs", at=held, efficiency=efficiency))
    return roofs(kernels={FLASH: replace(by_waves, **rates)})


@pytest.mark.parametrize(
    ("held", "efficiency", "thread_blocks", "seconds"),
    [
        ((1, 2), (0.25, 0.5), 2, 1 / 0.5),
        ((1, 2), (0.25, 0.5), 4, 1 / 0.5),
        ((1, 2), (0.25, 0.5), 3, (2 / 0.5 + 1 / 0.25) / 3),
        ((2,), (0.5,), 3, 2),  # only full waves were calibrated: one alone is as efficient
    ],
)
def test_waves_last_as_long_as_what_their_multiprocessors_hold(
    held: tuple[float, ...], efficiency: tuple[float, ...], thread_blocks: int, seconds: float
) -> None:
    """1 multiprocessor of 2 places: of 3 thread blocks the last is alone, with half of what two at a time reach."""
    work = op(kernel=FLASH, flops=1e12, grain=512, flash_grid=FlashGrid(thread_blocks))
    assert in_waves(held, efficiency).cost(work).seconds == pytest.approx(seconds)


def split_kv(*, elements: float = 0, q_rows: int = 16, partial_bytes: int = 0) -> SplitKV:
    """One thread block of one tile on the toy's one multiprocessor; its beginning and end take two tiles' time more."""
    held = round(elements / (1 + BEGUN_TILES))
    sizes = {"pairs": 1, "tiles": 1, "tile_elements": held, "per_multiprocessor": 1}
    return SplitKV(**sizes, q_rows=q_rows, partial_bytes=partial_bytes)


def test_partial_results_are_combined_after_the_reads_which_is_latency() -> None:
    """A flash grid of 1 over 2 tiles takes both places: 1 GB of each split written and read at half the rate."""
    flash = in_waves((1, 2), (0.25, 0.5), combine=rate(0.5, "1"))
    cost = flash.cost(op(kernel=FLASH, flops=1e12, flash_grid=FlashGrid(1, 2, partial_bytes=10**9)))
    assert (cost.latency_s, cost.bound_s) == (pytest.approx(2 * 2 / 0.5), pytest.approx(2))
    combine = replace(kernel(efficiency=curve(), latency_s=0.5), combine=rate(0.5, "1"))
    decode = roofs(kernels={KEY: combine})
    cost = decode.cost(op(kernel=KEY, vram_bytes=1e9, split_kv=split_kv(partial_bytes=500_000_000)))
    assert (cost.latency_s, cost.bound_s, cost.seconds) == (2.5, 1.0, 3.5)
    assert cost.latency_rates == (f"{KEY}#latency", f"{KEY}#combine")


def working(*counts: float) -> Roofs:
    """A machine of 1e9 operations a second whose kernel KEY takes so many an element at 16, 32, ... query rows."""
    bare = machine(kernels={KEY: replace(at_its_roof(KEY), operations=worlds.operations(*counts))})
    roof = Roof(rate=rate(1e9, "op/s"), datasheet=rate(2e9, "op/s"))
    return Roofs(replace(bare, gpu=replace(bare.gpu, instructions=roof)))


def test_operations_of_thread_blocks_are_a_roof_beside_the_bytes() -> None:
    """1e9 bytes take 1 s; 9e8 elements of 4 operations take 3.6 s, of half an operation less than the bytes."""
    work = op(kernel=KEY, vram_bytes=1e9, dequantised_elements=3e8, split_kv=split_kv(elements=9e8))
    slow, fast = working(4).cost(work), working(0.5).cost(work)
    assert (slow.bound_s, slow.wall, slow.bound_rates) == (3.6, "decode", ("instructions", f"{KEY}#operations"))
    assert (fast.bound_s, fast.wall) == (1, "vram")
    assert slow.sol_s == slow.floor_s * worlds.PEAK == 1


@pytest.mark.parametrize(("dequantised", "q_rows", "wall"), [(1, 32, "tensor"), (1, 16, "decode"), (0, 16, "tensor")])
def test_what_more_rows_add_are_products_and_rows_that_were_not_calibrated_are_told(
    dequantised: int, q_rows: int, wall: str
) -> None:
    """2 operations at 16 rows, 6 at 32: most of the latter, and all of a kernel that dequantises nothing."""
    work = op(kernel=KEY, dequantised_elements=dequantised, split_kv=split_kv(elements=9e8, q_rows=q_rows))
    assert working(2, 6).cost(work).wall == wall
    found = working(2, 4)
    beyond = replace(work, split_kv=split_kv(elements=9e8, q_rows=64))
    assert found.cost(beyond).bound_s == pytest.approx(0.9 * 8)
    assert found.extrapolated == {f"{KEY} at 64 program_rows"}


def test_a_last_round_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    """3 thread blocks on one multiprocessor fill it thrice; on two, at the same rate in all, one place stays idle."""
    one = working(4).profile
    two = replace(one, gpu=replace(one.gpu, sm_count=2))
    work = op(kernel=KEY, dequantised_elements=1, split_kv=replace(split_kv(elements=3e8), pairs=3))
    assert Roofs(two).cost(work).bound_s == pytest.approx(4 / 3 * Roofs(one).cost(work).bound_s)


def test_every_rate_of_a_cost_has_a_spread_and_every_wall_a_name() -> None:
    base = working(4).profile
    kernels = {KEY: kernel(efficiency=curve(), latency_s=1), LINEAR[1]: base.kernels[KEY]}
    found = Roofs(replace(base, kernels=base.kernels | kernels))
    ops = [op(kernel=KEY, vram_bytes=1), op(kernel=KEY, flops=1)]
    ops += [op(kernel=LINEAR[1], dequantised_elements=1, split_kv=split_kv(elements=9))]
    ops += [op(engine, link_bytes=1, run_bytes=1) for engine in Engine if engine is not Engine.SM]
    costs = [found.cost(each) for each in ops]
    assert {cost.wall for cost in costs} | {"latency"} == set(WALLS)
    assert {rate for cost in costs for rate in cost.bound_rates + cost.latency_rates} <= found.rates.keys()


COUNT = st.floats(0, 1e12)


@worlds.LAWS
@given(COUNT, COUNT, COUNT, st.floats(0.01, 1), st.floats(0, 1))
def test_nothing_is_faster_than_its_roofs(
    vram_bytes: float, flops: float, link_bytes: float, efficiency: float, latency_s: float
) -> None:
    """Datasheet floor <= calibrated roofs <= seconds, whatever the efficiency; a higher efficiency is never slower."""
    work = op(kernel=KEY, vram_bytes=vram_bytes, flops=flops, link_bytes=link_bytes)
    own = {KEY: kernel(efficiency=curve(efficiency=(efficiency,)), latency_s=max(latency_s, 1e-8))}
    cost, best = roofs(kernels=own).cost(work), roofs().cost(work)
    assert cost.floor_s <= cost.sol_s <= cost.bound_s * (1 + 1e-12)
    assert cost.seconds == pytest.approx(cost.latency_s + cost.bound_s)
    assert best.seconds <= cost.seconds * (1 + 1e-12)


def weights(tokens: float, *, tile: int = 1, full: float = 40.0) -> Op:
    """1 GB of weights, whose bytes take as long as the products of `full` tokens."""
    issued = -(-tokens // tile) * tile
    return op(kernel=KEY, vram_bytes=1e9, flops=issued / full * 1e12, grain=tokens, row_tile=tile)


def weights_s(tokens: float, *, at: tuple[float, ...], efficiency: tuple[float, ...], **shape: Any) -> float:
    found = roofs(kernels={KEY: kernel(efficiency=curve(at=at, efficiency=efficiency))})
    return found.cost(weights(tokens, **shape)).seconds


STEEP: dict[str, Any] = {"at": (1.0, 16.0, 64.0), "efficiency": (0.5, 0.4, 1.0)}
"""Between 16 and 64 tokens efficiency rises faster than any roof."""


@pytest.mark.parametrize("tile", [1, 16])
def test_products_take_what_was_calibrated_at_the_tokens_that_it_was_calibrated_at(tile: int) -> None:
    found = [weights_s(tokens, tile=tile, **STEEP) for tokens in STEEP["at"]]
    assert found == pytest.approx([1 / 0.5, 1 / 0.4, 64 / 40 / 1.0])
    # Where each token chooses its experts an op does not say how many are read by other numbers of them
    experts = roofs(kernels={KEY: kernel(efficiency=curve(**STEEP))}).cost(replace(weights(32), row_tile=0))
    assert experts.seconds == pytest.approx(1 / 0.7)


def test_every_token_of_a_tile_takes_as_long_as_its_first_unless_one_of_them_was_calibrated() -> None:
    flat: dict[str, Any] = {"at": (1.0, 16.0, 64.0), "efficiency": (0.5, 0.5, 0.6), "tile": 16, "full": 8}
    for first in (17, 33):
        assert len({weights_s(tokens, **flat) for tokens in range(first, first + 16)}) == 1
    assert weights_s(49, **flat) == pytest.approx(64 / 8 / 0.6)


TOKENS = st.integers(1, 3000)


@worlds.LAWS
@given(
    st.lists(st.floats(0.05, 1), min_size=1, max_size=5), st.floats(1, 3000), TOKENS, TOKENS, st.sampled_from((1, 16))
)
def test_more_tokens_take_no_less_time_where_calibrated_ones_do_not(
    efficiency: list[float], full: float, one: int, other: int, tile: int
) -> None:
    at = (1.0, 16.0, 64.0, 512.0, 2048.0)[: len(efficiency)]
    shape: dict[str, Any] = {"at": at, "efficiency": tuple(efficiency), "tile": tile, "full": full}
    points = [weights_s(tokens, **shape) for tokens in at]
    assume(points == sorted(points))
    few, many = sorted((one, other))
    assert weights_s(many, **shape) >= weights_s(few, **shape) * (1 - 1e-9)


LENT = "linear/other/bf16"
WHOLE = 0.25


def lending(own: Kernel, *, of_group: bool = True) -> Ladder:
    """Lends LENT: products are off by 0.3, those of many tokens by 0.1, launches by 0.6; by 0.4 where nobody says."""
    spreads = {
        name: learned(spread)
        for name, spread in (("products", 0.3), ("products of many tokens", 0.1), ("latencies", 0.6))
    }
    carried = {LENT: {ANY: Carried(kernel=own, machines=("there",), of_group=of_group)}}
    return Ladder(
        schema=SCHEMA, carried=carried, typical={}, whole=learned(WHOLE), carried_spreads=spreads, typical_spreads={}
    )  # fmt: skip


def borrowing(own: Kernel, *, of_group: bool = True, **changes: Any) -> Roofs:
    return Roofs(machine(**changes), strict=False, ladder=lending(own, of_group=of_group))


HALF = kernel(efficiency=curve(efficiency=(0.5,)), latency_s=0.25)


def test_a_borrowed_kernel_is_a_share_of_this_machines_roofs_and_hangs_on_the_spreads_of_its_group() -> None:
    found = borrowing(HALF)
    bytes_bound, products = (found.cost(op(kernel=LENT, **work)) for work in ({"vram_bytes": 1e9}, {"flops": 1e12}))
    assert bytes_bound.seconds == products.seconds == 2.25
    assert bytes_bound.bound_rates == ("vram", f"{LENT}#efficiency", "carried products")
    assert products.bound_rates == ("tensor.fp16", f"{LENT}#efficiency", "carried products of many tokens")
    assert bytes_bound.latency_rates == products.latency_rates == (f"{LENT}#latency", "carried latencies")
    spreads = {name: found.rates[name].spread for name in found.rungs if "#" not in name}
    assert spreads == {"carried products": 0.3, "carried products of many tokens": 0.1, "carried latencies": 0.6}
    assert found.rungs.keys() == {*spreads, f"{LENT}#efficiency", f"{LENT}#latency"}
    assert set(found.rungs.values()) == {"carried"}


def test_a_group_of_which_no_more_is_known_has_one_spread_for_all() -> None:
    there = lending(HALF)
    known = {"products": there.carried_spreads["products"]}
    found = Roofs(machine(), strict=False, ladder=replace(there, carried_spreads=known))
    found.cost(op(kernel=LENT, vram_bytes=1e9))
    assert {found.rates[name].spread for name in found.rungs if "#" not in name} == {0.3}


def test_a_borrowed_kernel_that_says_itself_how_far_it_is_off_hangs_on_that_alone_and_is_borrowed_all_the_same() -> (
    None
):
    shares = replace(curve(efficiency=(0.5,)), spread=0.4, spreads=(0.4,))
    found = borrowing(Kernel(efficiency=shares, latency=rate(0.25, "s", spread=0.7)), of_group=False)
    cost = found.cost(op(kernel=LENT, vram_bytes=1e9))
    (together,) = cost.bound_rates
    assert (cost.seconds, cost.latency_rates) == (2.25, (f"{LENT}#latency",))
    assert (found.rates[together].spread, found.rates[f"{LENT}#latency"].spread) == (0.4, 0.7)
    assert found.rungs[together] == found.rungs[f"{LENT}#latency"] == "carried"


def test_borrowed_seconds_are_off_as_whole_steps_are() -> None:
    found = borrowing(HALF)
    assert found.whole_spread == 0
    found.cost(op(kernel=LENT, vram_bytes=1e9))
    assert found.whole_spread == WHOLE


def test_a_kernel_of_ones_own_is_not_borrowed() -> None:
    found = borrowing(HALF, kernels={LENT: at_its_roof(LENT)})
    assert found.cost(op(kernel=LENT, vram_bytes=1e9)).seconds == 1
    assert not found.rungs


def test_nothing_is_borrowed_where_only_measured_rates_may_answer() -> None:
    lends, refuses = (Roofs(machine(), strict=strict, ladder=lending(HALF)) for strict in (False, True))
    assert (lends.has(LENT), refuses.has(LENT), refuses.has(KEY)) == (True, False, True)
    assert not lends.has("pray/other/bf16")
    with pytest.raises(MissingRate, match=f"machine toy has no rate for {LENT}"):
        refuses.cost(op(kernel=LENT, vram_bytes=1e9))
    assert not refuses.rungs


@pytest.mark.parametrize(
    ("dtype", "has", "computed_in"),
    [
        ("bf16", ("fp16", "fp32"), "fp16"),
        ("bf16", ("bf16", "fp16"), "bf16"),
        ("fp16", ("fp32",), "fp32"),
        ("fp8", ("bf16", "fp32"), "bf16"),
        ("fp4", ("bf16", "fp16"), "fp16"),
        ("fp32", ("fp16",), None),
    ],
)
def test_products_are_computed_in_the_next_wider_type_that_a_device_has(
    dtype: str, has: tuple[str, ...], computed_in: str | None
) -> None:
    toy, work = machine(), op(kernel=KEY, flops=1e12, dtype=dtype)
    there = replace(toy, gpu=replace(toy.gpu, tensor=dict.fromkeys(has, toy.gpu.tensor["fp16"])))
    own = Roofs(there, strict=False)
    if computed_in is None:
        with pytest.raises(MissingRate, match=f"no {dtype} tensor rate"):
            own.cost(work)
    else:
        assert own.cost(work).bound_rates[0] == f"tensor.{computed_in}"
    if computed_in != dtype:
        with pytest.raises(MissingRate, match=f"no {dtype} tensor rate"):
            Roofs(there).cost(work)


def test_a_device_whose_instructions_nobody_counted_issues_as_many_as_a_borrowed_kernel_needs() -> None:
    """9e8 elements of 4 operations take 3.6 s where 1e9 are issued a second; the bytes take 1 s."""
    own = replace(at_its_roof(LENT), operations=worlds.operations(4))
    work = op(kernel=LENT, vram_bytes=1e9, split_kv=split_kv(elements=9e8))
    uncounted, counted = borrowing(own), Roofs(working(4).profile, strict=False, ladder=lending(own))
    assert (uncounted.cost(work).seconds, counted.cost(work).seconds) == (1, 3.6)
    assert uncounted.extrapolated == {f"{LENT} without a rate of instructions"}
    assert not counted.extrapolated

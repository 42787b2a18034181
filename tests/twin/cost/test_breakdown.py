"""What is summed along the critical path is the time; bytes and floors follow the ops, critical or not."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from tests.worlds import LATENCY_S, LINEAR, PEAK, curve, kernel, machine
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import MissingRate
from twin.operations.ops import Engine, Op, OpGraph

KEY = LINEAR[0]


def op(part: str, engine: Engine = Engine.SM, *after: int, **counts: Any) -> Op:
    return Op(part=part, engine=engine, device=0, after=after, **counts)


def ran(*ops: Op, profile: HardwareProfile | None = None, **repeated: Any) -> Breakdown:
    return Breakdown().run((OpGraph(ops=ops, **repeated),), Roofs(profile or machine()))


READ = op("read", kernel=KEY, vram_bytes=3e9)
COPY = op("copy", Engine.H2D, link_bytes=5e9)
WRITE = op("write", Engine.D2H, link_bytes=1e9)


def test_only_the_critical_path_is_summed_by_part_but_all_work_by_engine() -> None:
    found = ran(READ, COPY, WRITE)
    assert found.seconds == pytest.approx(5 + LATENCY_S)
    assert {part.name: part.seconds for part in found.parts()} == pytest.approx({"copy": 5, "copy.latency": LATENCY_S})
    assert found.busy_s() == pytest.approx({Engine.SM: 3, Engine.H2D: 5 + LATENCY_S, Engine.D2H: 1 + LATENCY_S})
    assert (found.floor_s(), found.naive_s()) == (5 / PEAK, (3 + 5 + 1) / PEAK)
    assert Breakdown().floor_s() == Breakdown().naive_s() == 0


def test_parts_are_listed_longest_first_with_what_holds_them() -> None:
    parts = ran(op("a", kernel=KEY, flops=1e12), replace(COPY, after=(0,)), replace(READ, after=(1,))).parts()
    walls = {part.name: part.wall for part in parts}
    assert list(walls) == ["copy", "read", "a", "copy.latency"]
    assert list(walls.values()) == ["host link (H2D)", "VRAM bandwidth", "tensor cores", "launch and link latency"]
    assert parts[0].rates == ("h2d",)


def test_ops_of_one_part_are_one_line_held_by_the_longer_and_the_bound_is_the_wall_with_the_largest_sum() -> None:
    (part,) = ran(op("a", kernel=KEY, flops=1e12), op("a", Engine.SM, 0, kernel=KEY, vram_bytes=2e9)).parts()
    assert (part.seconds, part.sol_s, part.wall) == (3, 3, "VRAM bandwidth")
    assert set(part.rates) == {"vram", "tensor.fp16", f"{KEY}#efficiency"}
    products = op("a", kernel=KEY, flops=2e12), op("b", Engine.SM, 0, kernel=KEY, flops=2e12)
    assert ran(*products, replace(READ, after=(1,))).bound() == "tensor cores"
    assert Breakdown().bound() == "nothing"
    slow = machine(kernels={KEY: kernel(efficiency=curve(efficiency=(0.5,)), latency_s=1)})
    parts = {part.name: (part.seconds, part.sol_s) for part in ran(READ, profile=slow).parts()}
    assert parts == {"read": (6, 3), "read.latency": (1, 0)}  # the speed of light leaves efficiency and latency out
    with pytest.raises(MissingRate, match="has no rate for a/toy/fp16, b/toy/fp16"):
        ran(*(op(name, kernel=f"{name}/toy/fp16", vram_bytes=1) for name in "ab"))


def test_bytes_of_a_cache_over_the_links_count_calls_iterations_and_times() -> None:
    found = ran(replace(COPY, calls=2, link_bytes=10), replace(WRITE, link_bytes=7), iterations=3, times=5)
    assert (found.link_bytes, found.link_write_bytes) == (2 * 10 * 15, 7 * 15)
    copied_s, written_s = 15 * 2 * (LATENCY_S + 1e-8), 15 * (LATENCY_S + 7e-9)
    assert found.busy_s() == pytest.approx({Engine.H2D: copied_s, Engine.D2H: written_s})
    assert ran(op("a", kernel=KEY, link_bytes=9)).link_bytes == 9  # a kernel that reads over the link
    for part in ("hop", "ngram"):
        other = ran(replace(COPY, part=part), replace(WRITE, part=part))
        assert (other.link_bytes, other.link_write_bytes) == (0, 0)
        assert other.seconds > 5


def test_adding_is_the_same_as_running_one_after_the_other() -> None:
    roofs = Roofs(machine())
    first, second = (OpGraph(ops=(READ, COPY)),), (OpGraph(ops=(WRITE, READ), times=2),)
    run = Breakdown().run(first, roofs).run(second, roofs).run(second, roofs)
    added = Breakdown().add(Breakdown().run(first, roofs)).add(Breakdown().run(second, roofs), times=2)
    assert added.seconds == pytest.approx(run.seconds)
    assert [part.name for part in added.parts()] == [part.name for part in run.parts()]
    assert [part.seconds for part in added.parts()] == pytest.approx([part.seconds for part in run.parts()])
    assert added.busy_s() == pytest.approx(run.busy_s())
    assert (added.link_bytes, added.link_write_bytes) == (run.link_bytes, run.link_write_bytes)
    assert (added.floor_s(), added.naive_s()) == pytest.approx((run.floor_s(), run.naive_s()))


def test_independent_spreads_add_in_squares() -> None:
    """3 s that depend on the memory's rate at 10 % and 5 s on the link's at 20 %: sqrt(0.3^2 + 1.0^2) s."""
    gpu = machine().gpu
    read = replace(gpu.vram_read, rate=replace(gpu.vram_read.rate, spread=0.1))
    h2d = replace(gpu.h2d, rate=replace(gpu.h2d.rate, spread=0.2))
    unsure = replace(machine(), gpu=replace(gpu, vram_read=read, h2d=h2d))
    found = ran(READ, replace(COPY, after=(0,)), profile=unsure)
    assert found.sensitivity() == pytest.approx(
        {"vram": 3, f"{KEY}#efficiency": 3, "h2d": 5, "h2d.latency": LATENCY_S}, rel=1e-12
    )
    assert found.spread_s(Roofs(unsure)) == pytest.approx(math.hypot(0.3, 1.0))


def test_what_nobody_measured_widens_its_own_share_and_nothing_else() -> None:
    """Two equal calls, of which one is borrowed: beside both rates' own spreads half of what whole steps are off by."""
    roofs, foreign = Roofs(machine(), strict=False), replace(READ, kernel="linear/nobodys/bf16")
    own = Breakdown().run((OpGraph(ops=(READ,)),), roofs)
    before = own.spread_s(roofs)
    other = Breakdown().run((OpGraph(ops=(foreign,)),), roofs)
    assert roofs.rungs
    assert own.spread_s(roofs) == before  # whatever else the same rates were asked for
    assert (own.borrowed_s, other.borrowed_s) == (0, pytest.approx(other.seconds))
    both = Breakdown().add(own).add(other)
    apart = sum((s * roofs.rates[rate].spread) ** 2 for rate, s in both.sensitivity().items())
    assert roofs.whole_spread > 0
    assert both.spread_s(roofs) ** 2 - apart == pytest.approx((other.seconds * roofs.whole_spread) ** 2)

"""Devices of several kinds: layers by the memory of each, each op at the rates of its own device."""

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from hwprofiles.errors import NotShipped, UnknownName
from hwprofiles.profile import Roof, mixed
from tests.worlds import BYTES_PER_S, PEAK, case, machine, model, rate
from twin.ask.case import Case
from twin.ask.question import Question
from twin.cost.breakdown import Breakdown
from twin.cost.mixed import MixedRoofs, roofs_of
from twin.cost.roofline import Roofs
from twin.errors import Impossible, MissingRate
from twin.memory.plan import plan_memory
from twin.operations.lower import decode_program, last_device, layer_groups, split_layers
from twin.operations.ops import Step
from twin.prediction import predict, refuse_borrowed


def device(name: str, *, times: float = 1, vram_bytes: float = 2**30) -> HardwareProfile:
    """A toy whose memory is so many times as quick."""
    toy = machine(vram_bytes=vram_bytes)
    read = Roof(rate=rate(times * BYTES_PER_S, "B/s"), datasheet=rate(times * PEAK * BYTES_PER_S, "B/s"))
    return replace(toy, name=name, gpu=replace(toy.gpu, vram_read=read))


def decode_s(asked: Case, profile: HardwareProfile) -> float:
    step = Step(kv_tokens=64, q_tokens=1)
    return Breakdown().run(decode_program(asked, step, profile.stages(1)), roofs_of(profile)).seconds


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [((1.0, 1.0), [2, 2]), ((3.0, 1.0), [3, 1]), ((24.0, 12.0, 12.0), [2, 1, 1]), ((9.0, 1.0), [4, 0])],
)
def test_layers_go_where_the_memory_is(shares: tuple[float, ...], sizes: list[int]) -> None:
    found = split_layers(4, shares)
    assert [found.count(place) for place in range(len(shares))] == sizes
    assert found == tuple(sorted(found))
    assert last_device(shares) == len(shares) - 1


def test_layers_of_one_kind_are_apart_where_devices_differ() -> None:
    kinds = ("a", "b", "a", "b")
    assert [(each.device, each.kind, each.count) for each in layer_groups(kinds, (0, 0, 1, 1), apart=True)] == [
        (0, "a", 1), (0, "b", 1), (1, "a", 1), (1, "b", 1),
    ]  # fmt: skip
    assert [(each.device, each.kind, each.count) for each in layer_groups(kinds, (0, 0, 1, 1))] == [
        (0, "a", 2),
        (0, "b", 2),
    ]


def test_each_device_works_at_its_own_rates() -> None:
    """Two slow devices, two quick ones, one of each: with as many layers on each the mean of both, hops the same."""
    asked = case(64, spec=model(every=1), layout="vram")
    slow, quick = device("slow"), device("quick", times=4)
    alike = [decode_s(asked, replace(each, gpu_count=2)) for each in (slow, quick)]
    head_apart = [decode_s(asked, mixed(pair)) for pair in ((slow, quick), (quick, slow))]
    assert sum(head_apart) == pytest.approx(sum(alike))
    assert alike[1] < min(head_apart) < max(head_apart) < alike[0]


def test_rates_say_whose_they_are_and_alike_devices_are_only_many() -> None:
    both = mixed((device("slow"), device("quick", times=4)))
    roofs = roofs_of(both)
    assert isinstance(roofs, MixedRoofs)
    breakdown = Breakdown().run(
        decode_program(case(64, layout="vram"), Step(kv_tokens=64, q_tokens=1), both.stages(1)), roofs
    )
    used = set(breakdown.sensitivity())
    assert {"vram@slow", "vram@quick"} <= used <= set(roofs.rates)
    many = mixed((device("slow"), device("slow")))
    assert (many.gpu_count, many.devices, many.name) == (2, (), "2x-slow")
    assert type(roofs_of(many)) is Roofs


def test_a_rate_is_borrowed_for_the_device_that_lacks_it_and_refused_once() -> None:
    key = "linear/exllamav3/bf16"
    poor = device("poor")
    poor = replace(poor, kernels={name: own for name, own in poor.kernels.items() if name != key})
    both = mixed((device("rich"), poor))
    roofs, program = (
        roofs_of(both, strict=False),
        decode_program(case(64), Step(kv_tokens=64, q_tokens=1), both.stages(1)),
    )
    Breakdown().run(program, roofs)
    assert roofs.rungs.keys() <= roofs.rates.keys()
    assert {name.partition("@")[2] for name in roofs.rungs} == {"poor"}
    assert {name.partition("#")[0] for name in roofs.rungs if "#" in name} == {key}
    with pytest.raises(MissingRate, match=rf"^not measured on rich\+poor: {key} \(\w+\)$"):
        refuse_borrowed(roofs)
    with pytest.raises(MissingRate):
        Breakdown().run(program, roofs_of(both))


def test_memory_of_each_device_is_its_own() -> None:
    pair = mixed((device("small", vram_bytes=2**30), device("large", vram_bytes=3 * 2**30)))
    plan = plan_memory(case(64, layout="vram"), pair)
    assert [memory.capacity_bytes for memory in plan.devices()] == [2**30, 3 * 2**30]
    small, large = (memory.fixed["weights"] for memory in plan.devices())
    assert small < large


def test_machines_are_joined_by_name() -> None:
    pair = load_profile("rtx4070+rtx3060")
    assert (pair.name, pair.gpu_count) == ("rtx4070+rtx3060-12gb", 2)
    assert [each.name for each in pair.devices] == ["rtx4070", "rtx3060-12gb"]
    assert [each.name for each in load_profile("3x-rtx3090 + rtx4070").devices] == ["rtx3090"] * 3 + ["rtx4070"]
    assert load_profile("rtx3090+rtx3090") == load_profile("rtx3090").repeated(2)
    with pytest.raises(UnknownName, match="nosuch"):
        load_profile("rtx3090+nosuch")
    for short in ("rtx3090+", "+rtx3090", "rtx3090++rtx4070"):
        with pytest.raises(NotShipped, match=r"rtx3090.*is not shipped"):
            load_profile(short)
    with pytest.raises(NotShipped) as refused:
        load_profile("rtx3090+gb10")
    assert "the memory of gb10 is its host's" in refused.value.hint


@pytest.mark.parametrize("asked", [{"gpus": 3}, {"lanes": 4}, {"vram_free_bytes": 2**30}])
def test_what_is_of_one_kind_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(Impossible, match="its devices are of several kinds"):
        predict(
            Question(
                ctx_tokens=1024, hw="rtx4070+rtx3060", model="qwen3-8b", weights="4.0bpw", engine="exllamav3", **asked
            )
        )
    with pytest.raises(Impossible, match="vllm is modelled on devices of one kind"):
        predict(Question(ctx_tokens=1024, hw="rtx4070+rtx3060", model="qwen3-8b", engine="vllm", split="layer"))

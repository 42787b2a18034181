"""What a machine may claim: units, ranges, datasheet peaks, names of kernels; and what a question changes of it."""

import functools
import operator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hwprofiles import load_profile, profile_names
from hwprofiles.links import LANES
from hwprofiles.profile import HardwareProfile
from tests.worlds import curve, kernel, link, machine

GONE = object()


def converted(**changes: object) -> HardwareProfile:
    """The toy machine with other values, by their path with double underscores; GONE takes a key away."""
    data: dict[str, Any] = msgspec.to_builtins(machine())
    for path, value in changes.items():
        *above, last = path.split("__")
        holder = functools.reduce(operator.getitem, above, data)
        if value is GONE:
            del holder[last]
        else:
            holder[last] = msgspec.to_builtins(value)
    return msgspec.convert(data, HardwareProfile)


def test_a_machine_survives_writing_and_reading_and_the_shipped_have_their_own_names() -> None:
    assert converted() == machine()
    for name in profile_names():
        assert load_profile(name).name == name
    assert all(load_profile(name).kernels for name in ("rtx3090", "3x-rtx3090", "h200"))


WRONG: list[tuple[str, object, str]] = [
    ("schema", "twin.hardware/2", r"schema must be 'twin\.hardware/1'"),
    ("gpu_count", 0, r"\$\.gpu_count"),
    ("gpu_count", 1025, r"\$\.gpu_count"),
    ("gpu__compute_capability", "8", r"\$\.gpu\.compute_capability"),
    ("gpu__sm_count", 0, r"\$\.gpu\.sm_count"),
    ("gpu__vram__value", 24.0, r"\$\.gpu\.vram: 24 B is outside the range"),
    ("gpu__vram__unit", "s", r"\$\.gpu\.vram: unit must be 'B', not 's'"),
    ("gpu__vram_read__rate__value", 835.0, r"\$\.gpu\.vram_read\.rate: 835 B/s is outside"),
    ("gpu__vram_read__rate__value", 3e9, r"\$\.gpu\.vram_read: the rate 3e\+09 is above its datasheet peak"),
    ("gpu__vram_read__datasheet__value", 936.0, r"\$\.gpu\.vram_read\.datasheet"),
    ("gpu__tensor__fp16__rate__value", 63.0, r"\$\.gpu\.tensor\.fp16\.rate: 63 FLOP/s"),
    ("gpu__tensor__fp16__rate__unit", "B/s", r"\$\.gpu\.tensor\.fp16\.rate: unit must"),
    ("gpu__h2d__rate__value", 26.5, r"\$\.gpu\.h2d\.rate: 26\.5 B/s is outside"),
    ("gpu__d2h__rate__value", 9e9, r"\$\.gpu\.d2h: the rate 9e\+09 is above"),
    ("gpu__h2d__latency__value", 20.0, r"\$\.gpu\.h2d\.latency: 20 s is outside"),
    ("gpu__h2d__latency__unit", "B", r"\$\.gpu\.h2d\.latency: unit must be 's'"),
    ("gpu__h2d__run_length__over", "tokens", r"\$\.gpu\.h2d\.run_length: 'over' must be"),
    ("host__memory__value", 128.0, r"\$\.host\.memory: 128 B is outside"),
    ("host__reserved__value", 1e12, r"\$\.host\.reserved: 1e\+12 B is outside"),
    ("host__dram__rate__value", 45.0, r"\$\.host\.dram\.rate"),
    ("host__disk__run_length__over", "tokens", r"\$\.host\.disk\.run_length"),
    ("kernels__a/b", kernel(latency_s=1), r"\$\.kernels\.a/b: a kernel is"),
    ("kernels__a/b/c", {}, "needs an efficiency, a latency or both"),
    ("kernels__a/b/c", kernel(latency_s=46.7), r"\$\.kernels\.a/b/c\.latency: 46\.7 s is outside"),
    ("kernels__linear/a/b", kernel(efficiency=curve(over="rows")), r"efficiency: 'over' must be 'tokens', not 'rows'"),
    (
        "kernels__attend_dense/a/b",
        kernel(efficiency=curve(over="tokens")),
        r"\$\.kernels\.attend_dense/a/b\.efficiency: 'over' must be 'rows' or 'resident_programs', not 'tokens'",
    ),
    ("gpu__colour", 1, r"unknown field `colour` - at `\$\.gpu`"),
    ("gpu__h2d__lanes", 1, r"unknown field `lanes` - at `\$\.gpu\.h2d`"),
    *(
        (path, GONE, f"missing required field `{path.split('__')[-1]}`")
        for path in ("gpu", "host", "gpu__h2d", "gpu__vram", "host__memory", "gpu__h2d__rate")
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_machine_that_cannot_be_is_refused_by_its_key(path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converted(**{path: value})


@pytest.mark.parametrize("lanes", LANES)
def test_fewer_lanes_narrow_both_directions_and_nothing_else(lanes: int) -> None:
    """Also below what a measured file may say: 100 MB/s is the least there."""
    whole = machine(h2d=link(bytes_per_s=1e8))
    narrow = whole.with_link(lanes)
    for before, after in ((whole.gpu.h2d, narrow.gpu.h2d), (whole.gpu.d2h, narrow.gpu.d2h)):
        assert after.rate.value == before.rate.value * lanes / 16
        assert after.datasheet.value == before.datasheet.value * lanes / 16
        assert (after.latency, after.run_length) == (before.latency, before.run_length)
    assert whole.gpu.h2d.rate.value == 1e8
    assert narrow.gpu.vram_read == whole.gpu.vram_read
    assert (narrow.host, narrow.kernels) == (whole.host, whole.kernels)


RTX3090, M3_MAX = load_profile("rtx3090"), load_profile("m3-max")


@pytest.mark.parametrize(
    ("lanes", "generation", "peak"),
    [(16, 4, 31.5e9), (16, 3, 15.76e9), (4, 3, 3.94e9), (8, 4, 15.752e9), (1, None, 31.5e9 / 16), (1, 1, 0.25e9)],
)
def test_a_link_of_another_generation_is_a_share_of_the_machines_own(
    lanes: int, generation: int | None, peak: float
) -> None:
    other = RTX3090.with_link(lanes, generation).gpu
    for before, after in ((RTX3090.gpu.h2d, other.h2d), (RTX3090.gpu.d2h, other.d2h)):
        assert after.datasheet.value == pytest.approx(peak, rel=1e-3)
        assert after.rate.value / after.datasheet.value == pytest.approx(before.rate.value / before.datasheet.value)


def test_no_link_is_faster_than_the_machines_own_and_narrow_cards_stay_what_they_are() -> None:
    narrow = load_profile("rtx4060ti-16gb")
    assert narrow.with_link(16) == narrow.with_link(8) == narrow
    assert narrow.with_link(16, 4) == narrow  # it has 8 lanes, whatever the slot
    assert narrow.with_link(4).gpu.h2d.rate.value == narrow.gpu.h2d.rate.value / 2
    with pytest.raises(ValueError, match=r"PCIe 5\.0 x16 is faster than its own PCIe 4\.0 x16, 31\.5 GB/s"):
        RTX3090.with_link(16, 5)
    with pytest.raises(ValueError, match="one memory and no link"):
        M3_MAX.with_link(8)


def test_a_machine_repeats_its_device_and_only_where_the_device_has_a_memory_of_its_own() -> None:
    three, shipped = RTX3090.repeated(3), load_profile("3x-rtx3090")
    assert replace(three, summary=shipped.summary) == shipped
    assert shipped.repeated(2).name == RTX3090.repeated(2).name == "2x-rtx3090"
    assert shipped.repeated(1).name == "rtx3090"
    with pytest.raises(ValueError, match="2 devices cannot each be the one memory"):
        M3_MAX.repeated(2)


def test_memory_is_as_asked_for_and_one_memory_keeps_its_share_for_the_device() -> None:
    more = RTX3090.with_ram(2.0**36)
    assert (more.host.memory.value, more.host.memory.spread, more.gpu) == (2.0**36, 0.0, RTX3090.gpu)
    mac = M3_MAX.with_ram(2.0**36)
    assert (mac.host.memory.value, mac.gpu.vram.value) == (2.0**36, 0.75 * 2.0**36)
    assert RTX3090.with_free_vram(2.0**34).gpu.vram.value == 2.0**34
    with pytest.raises(ValueError, match="fewer than 34,359,738,368 B"):
        RTX3090.with_free_vram(2.0**35)
    with pytest.raises(ValueError, match="--ram says how much"):
        M3_MAX.with_free_vram(2.0**30)
    with pytest.raises(ValueError, match=r"\$\.host\.reserved"):
        RTX3090.with_ram(2.0**30)


def test_one_memory_is_said_by_the_profile_or_a_cpu_and_has_no_more_than_the_host_and_one_device() -> None:
    same = machine().gpu.vram.value
    assert not converted(host__memory__value=same).gpu.shares_memory
    assert converted(host__memory__value=same, gpu__unified_memory=True).gpu.shares_memory
    assert converted(gpu__compute_capability="0.0").gpu.shares_memory
    assert converted(gpu__unified_memory=True).gpu.shares_memory  # of the host's memory a part
    with pytest.raises(ValueError, match=r"\$\.gpu\.vram: 1073741824 B is more than \$\.host\.memory, 536870912 B"):
        converted(host__memory__value=2.0**29, host__reserved__value=1.0, gpu__unified_memory=True)
    with pytest.raises(ValueError, match=r"\$\.gpu\.unified_memory: 2 devices"):
        converted(host__memory__value=same, gpu__unified_memory=True, gpu_count=2)

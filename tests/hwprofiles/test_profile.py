"""What a machine may claim: units, ranges, datasheet peaks, names of kernels; and fewer PCIe lanes."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hwprofiles import load_profile, profile_names
from hwprofiles.profile import HardwareProfile
from tests.worlds import curve, kernel, link, machine

Edit = Callable[[dict[str, Any]], object]


def converted(edit: Edit) -> HardwareProfile:
    data: dict[str, Any] = msgspec.to_builtins(machine())
    edit(data)
    return msgspec.convert(data, HardwareProfile)


def put(value: object, *path: str) -> Edit:
    """An edit that puts `value` under keys `path`."""

    def edit(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return edit


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_machine_loads_under_its_own_name(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.kernels


def test_a_machine_survives_writing_and_reading() -> None:
    assert converted(lambda _: None) == machine()


WRONG: list[tuple[str, Edit, str]] = [
    ("schema", put("twin.hardware/2", "schema"), r"schema must be 'twin\.hardware/1'"),
    ("no devices", put(0, "gpu_count"), r"\$\.gpu_count"),
    ("too many devices", put(1025, "gpu_count"), r"\$\.gpu_count"),
    ("capability", put("8", "gpu", "compute_capability"), r"\$\.gpu\.compute_capability"),
    ("no multiprocessors", put(0, "gpu", "sm_count"), r"\$\.gpu\.sm_count"),
    ("VRAM in GiB", put(24.0, "gpu", "vram", "value"), r"\$\.gpu\.vram: 24 B is outside the range"),
    ("VRAM in s", put("s", "gpu", "vram", "unit"), r"\$\.gpu\.vram: unit must be 'B', not 's'"),
    ("GB/s", put(835.0, "gpu", "vram_read", "rate", "value"), r"\$\.gpu\.vram_read\.rate: 835 B/s is outside"),
    ("above peak", put(3e9, "gpu", "vram_read", "rate", "value"), r"\$\.gpu\.vram_read: the rate 3e\+09 is above"),
    ("peak in GB/s", put(936.0, "gpu", "vram_read", "datasheet", "value"), r"\$\.gpu\.vram_read\.datasheet"),
    ("TFLOP/s", put(63.0, "gpu", "tensor", "fp16", "rate", "value"), r"\$\.gpu\.tensor\.fp16\.rate: 63 FLOP/s"),
    ("tensor in B/s", put("B/s", "gpu", "tensor", "fp16", "rate", "unit"), r"\$\.gpu\.tensor\.fp16\.rate: unit must"),
    ("link in GB/s", put(26.5, "gpu", "h2d", "rate", "value"), r"\$\.gpu\.h2d\.rate: 26\.5 B/s is outside"),
    ("link above peak", put(9e9, "gpu", "d2h", "rate", "value"), r"\$\.gpu\.d2h: the rate 9e\+09 is above"),
    ("latency in us", put(20.0, "gpu", "h2d", "latency", "value"), r"\$\.gpu\.h2d\.latency: 20 s is outside"),
    ("latency in B", put("B", "gpu", "h2d", "latency", "unit"), r"\$\.gpu\.h2d\.latency: unit must be 's'"),
    ("wrong axis", put("tokens", "gpu", "h2d", "run_length", "over"), r"\$\.gpu\.h2d\.run_length: 'over' must be"),
    ("host in GB", put(128.0, "host", "memory", "value"), r"\$\.host\.memory: 128 B is outside"),
    ("all reserved", put(1e12, "host", "reserved", "value"), r"\$\.host\.reserved: 1e\+12 B is outside"),
    ("DRAM in GB/s", put(45.0, "host", "dram", "rate", "value"), r"\$\.host\.dram\.rate"),
    ("disk axis", put("tokens", "host", "disk", "run_length", "over"), r"\$\.host\.disk\.run_length"),
    (
        "kernel without a format",
        put(msgspec.to_builtins(kernel(latency_s=1)), "kernels", "a/b"),
        r"\$\.kernels\.a/b: a kernel is",
    ),
    ("kernel without rates", put({}, "kernels", "a/b/c"), "needs an efficiency, a latency or both"),
    (
        "kernel latency in us",
        put({"latency": msgspec.to_builtins(kernel(latency_s=46.7).latency)}, "kernels", "a/b/c"),
        r"\$\.kernels\.a/b/c\.latency: 46\.7 s is outside",
    ),
    (
        "kernel axis",
        put(msgspec.to_builtins(kernel(efficiency=curve(over="rows"))), "kernels", "linear/a/b"),
        r"\$\.kernels\.linear/a/b\.efficiency: 'over' must be 'tokens', not 'rows'",
    ),
    (
        "kernel axes",
        put(msgspec.to_builtins(kernel(efficiency=curve(over="tokens"))), "kernels", "attend_dense/a/b"),
        r"\$\.kernels\.attend_dense/a/b\.efficiency: 'over' must be 'rows' or 'resident_programs', not 'tokens'",
    ),
    ("unknown key", put(1, "gpu", "colour"), r"unknown field `colour` - at `\$\.gpu`"),
    ("unknown key of a link", put(1, "gpu", "h2d", "lanes"), r"unknown field `lanes` - at `\$\.gpu\.h2d`"),
]


@pytest.mark.parametrize(("edit", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_machine_that_cannot_be_is_refused_by_its_key(edit: Edit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converted(edit)


@pytest.mark.parametrize(
    "path", [("gpu",), ("host",), ("gpu", "h2d"), ("gpu", "vram"), ("host", "memory"), ("gpu", "h2d", "rate")]
)
def test_a_missing_key_is_refused_by_its_name(path: tuple[str, ...]) -> None:
    def drop(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    with pytest.raises(ValueError, match=f"missing required field `{path[-1]}`"):
        converted(drop)


@pytest.mark.parametrize("lanes", [16, 8, 4])
def test_fewer_lanes_narrow_both_directions_and_nothing_else(lanes: int) -> None:
    whole, narrow = machine(), machine().with_lanes(lanes)
    for before, after in ((whole.gpu.h2d, narrow.gpu.h2d), (whole.gpu.d2h, narrow.gpu.d2h)):
        assert after.rate.value == before.rate.value * lanes / 16
        assert after.datasheet.value == before.datasheet.value * lanes / 16
        assert (after.latency, after.run_length) == (before.latency, before.run_length)
    assert narrow.gpu.vram_read == whole.gpu.vram_read
    assert (narrow.host, narrow.kernels) == (whole.host, whole.kernels)


@pytest.mark.parametrize("lanes", [8, 4])
def test_fewer_lanes_may_fall_below_what_a_measured_file_may_say(lanes: int) -> None:
    slow = machine(h2d=link(bytes_per_s=1e8))
    assert slow.with_lanes(lanes).gpu.h2d.rate.value == 1e8 * lanes / 16
    assert slow.gpu.h2d.rate.value == 1e8


def test_a_memory_is_the_hosts_where_the_profile_says_so_or_the_device_is_a_cpu() -> None:
    def same(data: dict[str, Any]) -> None:
        data["host"]["memory"]["value"] = data["gpu"]["vram"]["value"]

    def unified(data: dict[str, Any]) -> None:
        same(data)
        data["gpu"]["unified_memory"] = True

    assert not converted(same).gpu.shares_memory
    assert converted(unified).gpu.shares_memory
    assert converted(put("0.0", "gpu", "compute_capability")).gpu.shares_memory


def test_one_memory_has_one_size_and_one_device() -> None:
    with pytest.raises(
        msgspec.ValidationError, match=r"\$\.gpu\.vram: 1073741824 B is not \$\.host\.memory, 17179869184 B"
    ):
        converted(put(True, "gpu", "unified_memory"))

    def two(data: dict[str, Any]) -> None:
        data["host"]["memory"]["value"] = data["gpu"]["vram"]["value"]
        data["gpu"]["unified_memory"], data["gpu_count"] = True, 2

    with pytest.raises(msgspec.ValidationError, match=r"\$\.gpu\.unified_memory: 2 devices"):
        converted(two)

"""Building a profile: rates put into records come out of it, and its predictions give the samples back."""

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.build import LEAST_SPREAD, CannotCalibrate, build, checked
from calibrate.live import predict_case
from calibrate.machine.description import Machine
from calibrate.operations.table import Case
from calibrate.probes import ProbeRecord
from hwprofiles import HardwareProfile, load_profile
from tests.calibrate import probe_worlds as worlds


def made(machine: Machine | None = None, **changes: ProbeRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """The profile and its record; `changes` replace records by the probe's name."""
    records = worlds.records() | changes
    return build(
        machine=machine or worlds.machine(), records=records, name="toy", date="2026-11-29", command="twin calibrate"
    )


def built(**changes: ProbeRecord) -> HardwareProfile:
    return checked(made(**changes)[0])


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> HardwareProfile:
    """Written and read by the twin."""
    path = tmp_path_factory.mktemp("built") / "toy.json"
    path.write_text(json.dumps(made()[0]))
    return load_profile(str(path))


def test_rates_of_memories_links_and_disk_come_out_as_they_went_in(profile: HardwareProfile) -> None:
    """The link's are those of one more copy; short runs have a share."""
    gpu, host = profile.gpu, profile.host
    assert (gpu.vram.value, host.reserved.value, gpu.vram_read.rate.source) == (80 * 2**30, 8 * 2**30, "measured")
    assert gpu.vram_read.rate.value == pytest.approx(worlds.VRAM)
    assert gpu.h2d.latency.value == pytest.approx(worlds.COPY_LATENCY_S, rel=1e-2)
    assert (gpu.h2d.rate.value, gpu.d2h.rate.value) == pytest.approx((worlds.LINK, 0.9 * worlds.LINK), rel=1e-3)
    assert (gpu.h2d.run_length(512), gpu.h2d.run_length(4096)) == pytest.approx((0.4, 1.0), rel=1e-3)
    assert (host.disk.rate.value, host.disk.latency.value) == pytest.approx((worlds.DISK, 1e-4))
    assert (host.disk.run_length(4096), host.dram.run_length(64)) == pytest.approx((0.5, 0.1))


def test_the_spread_of_a_rate_is_that_of_its_rounds_and_not_of_its_repeats() -> None:
    def spread(*rounds: tuple[float, ...]) -> float:
        samples = tuple(
            replace(
                sample,
                seconds=tuple(factor * sample.median_s for own in rounds for factor in own),
                rounds=tuple(map(len, rounds)),
            )
            for sample in worlds.records()["decode_gather.host"].samples
        )
        kernels = built(**{"decode_gather.host": ProbeRecord(samples=samples)}).kernels
        efficiency = kernels["gather_host/twin/fp16"].efficiency
        assert efficiency is not None
        return efficiency.spread

    scattered = (0.5, 0.9, 1.0, 1.1, 1.5)
    assert spread(scattered, tuple(1.001 * factor for factor in scattered)) == LEAST_SPREAD
    own = 0.2 / math.sqrt(2)  # of two rounds 20 % apart; all probes' is from the median of such variances
    both = math.hypot(own, own / (7 / 9) ** 1.5) / math.sqrt(2)
    assert spread((0.9,) * 5, (1.1,) * 5) == pytest.approx(both, rel=0.01)


def test_kernel_rates_come_out_as_they_went_in(profile: HardwareProfile) -> None:
    gather, linear, scan, select = (
        profile.kernels[f"{name}/twin/fp16"] for name in ("gather_host", "linear", "scan", "select")
    )
    assert gather.latency is not None
    assert gather.efficiency is not None
    assert gather.latency.value == pytest.approx(worlds.GATHER_LATENCY_S, rel=0.02)
    for ctx, share in worlds.EFFICIENCY.items():
        assert gather.efficiency(ctx) == pytest.approx(share, rel=0.02)
    assert linear.latency is not None
    assert (scan.latency, select.efficiency) == (None, None)


@pytest.mark.parametrize("probe", ["decode_select", "decode_gather.vram", "decode_gather.host"])
def test_a_prediction_gives_the_calibrated_sample_back(profile: HardwareProfile, probe: str) -> None:
    operation, _, tier = probe.partition(".")
    for sample in worlds.records()[probe].samples:
        if sample.at.get("budget", 2048) == 2048:
            at = {"tier": tier or "vram", "ctx_tokens": sample.at["ctx_tokens"], "layers": 1}
            case = Case(operation=operation, at=at)
            _, seconds, low, high = predict_case(case, profile, kv_dtype="fp16")
            assert seconds == pytest.approx(sample.median_s, rel=1e-3)
            assert low <= seconds <= high


def test_a_peak_is_that_of_a_data_sheet_and_a_rate_above_it_is_told_not_hidden() -> None:
    known = worlds.machine(name="NVIDIA H200")
    gpu = made(known)[0]["gpu"]
    assert (gpu["vram_read"]["datasheet"]["value"], gpu["h2d"]["datasheet"]["value"]) == (4.8e12, 63.0e9)
    assert gpu["tensor"]["fp16"]["datasheet"]["source"] == "datasheet"
    quick = ProbeRecord(samples=(worlds.sample(2**30 / 9e12, moved=2**30, bytes=2**30),))
    above = made(known, vram_read=quick)[0]["gpu"]["vram_read"]["datasheet"]
    assert above["value"] > 9e12
    assert "above" in above["note"]


def test_without_a_needed_probe_and_with_one_out_of_range_there_is_no_profile() -> None:
    records = worlds.records()
    del records["vram_read"]
    with pytest.raises(CannotCalibrate, match="vram_read") as refused:
        build(machine=worlds.machine(), records=records, name="toy", date="2026-11-29")
    assert refused.value.exit_code == 2
    with pytest.raises(CannotCalibrate, match=r"\$\.gpu\.vram_read"):
        made(vram_read=ProbeRecord(samples=(worlds.sample(100.0, moved=2**30, bytes=2**30),)))


def test_the_record_keeps_raw_samples_and_residuals() -> None:
    _, record = made()
    copy = record["probes"]["host_to_device_copy"]["samples"][0]
    assert (copy["n"], len(copy["seconds"])) == (5, 5)
    assert record["queue_start_s"] == pytest.approx(worlds.QUEUE_START_S, rel=1e-2)
    assert (record["machine"]["driver"], record["command"]) == ("1.2", "twin calibrate")
    assert {row["at"]["ctx_tokens"] for row in record["fitted"]["gather_host/twin/fp16"]} == set(worlds.CONTEXTS)
    json.dumps(record, allow_nan=False)


def test_the_memory_of_a_cpu_is_the_hosts_and_its_16_bit_types_are_bounded_by_the_better_of_their_own_and_fp32() -> (
    None
):
    cpu = worlds.machine(device="cpu", compute_capability="0.0", smi={}, device_bytes=128 * 2**30)
    single = worlds.sample(1.0, flops=500e12, dtype="fp32", tokens=8, rows=8, columns=8)
    for machine, unified in ((cpu, True), (worlds.machine(), False)):
        profile, _ = made(machine, **{"product.fp32": ProbeRecord(samples=(single,))})
        assert profile["gpu"].get("unified_memory", False) is unified
        assert checked(profile).gpu.shares_memory is unified
        assert not unified or profile["gpu"]["tensor"]["fp16"]["rate"]["value"] == pytest.approx(500e12)

"""Building a profile: rates put into records come out of it, and its predictions give the samples back."""

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from calibrate.build import LEAST_SPREAD, CannotCalibrate, build, checked
from calibrate.live import predict_case
from calibrate.operations.table import Case
from calibrate.probes import Machine, ProbeRecord
from hwprofiles import HardwareProfile, load_profile
from tests.calibrate import probe_worlds as worlds


def built(tmp_path: Path, **changes: ProbeRecord) -> HardwareProfile:
    profile, _ = build(machine=worlds.machine(), records=worlds.records() | changes, name="toy", date="2026-11-29")
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(profile))
    return load_profile(str(path))


def test_the_profile_is_one_that_the_twin_reads(tmp_path: Path) -> None:
    profile = built(tmp_path)
    assert profile.gpu.vram_read.rate.value == pytest.approx(worlds.VRAM)
    assert profile.gpu.vram.value == 80 * 2**30
    assert profile.host.reserved.value == 8 * 2**30
    assert profile.gpu.vram_read.rate.source == "measured"


def test_the_spread_of_a_rate_is_that_of_its_rounds_and_not_of_its_repeats(tmp_path: Path) -> None:
    def spread(*rounds: tuple[float, ...]) -> float:
        samples = tuple(
            replace(
                sample,
                seconds=tuple(factor * sample.median_s for own in rounds for factor in own),
                rounds=tuple(map(len, rounds)),
            )
            for sample in worlds.records()["decode_gather.host"].samples
        )
        efficiency = (
            built(tmp_path, **{"decode_gather.host": ProbeRecord(samples=samples)})
            .kernels["gather_host/twin/fp16"]
            .efficiency
        )
        assert efficiency is not None
        return efficiency.spread

    scattered = (0.5, 0.9, 1.0, 1.1, 1.5)
    assert spread(scattered, tuple(1.001 * factor for factor in scattered)) == LEAST_SPREAD
    own = 0.2 / math.sqrt(2)  # of two rounds 20 % apart; all probes' is from the median of such variances
    assert spread((0.9,) * 5, (1.1,) * 5) == pytest.approx(
        math.hypot(own, own / (7 / 9) ** 1.5) / math.sqrt(2), rel=0.01
    )


def test_the_link_has_the_rate_and_latency_of_one_more_copy(tmp_path: Path) -> None:
    profile = built(tmp_path)
    assert profile.gpu.h2d.rate.value == pytest.approx(worlds.LINK, rel=1e-3)
    assert profile.gpu.h2d.latency.value == pytest.approx(worlds.COPY_LATENCY_S, rel=1e-2)
    assert profile.gpu.d2h.rate.value == pytest.approx(0.9 * worlds.LINK, rel=1e-3)
    assert profile.gpu.h2d.run_length(512) == pytest.approx(0.4, rel=1e-3)
    assert profile.gpu.h2d.run_length(4096) == pytest.approx(1.0, rel=1e-3)


def test_disk_and_memory_have_a_share_for_short_runs(tmp_path: Path) -> None:
    profile = built(tmp_path)
    assert profile.host.disk.rate.value == pytest.approx(worlds.DISK)
    assert profile.host.disk.run_length(4096) == pytest.approx(0.5)
    assert profile.host.disk.latency.value == pytest.approx(1e-4)
    assert profile.host.dram.run_length(64) == pytest.approx(0.1)


def test_kernel_rates_come_out_as_they_went_in(tmp_path: Path) -> None:
    kernels = built(tmp_path).kernels
    gather = kernels["gather_host/twin/fp16"]
    assert gather.latency is not None
    assert gather.efficiency is not None
    assert gather.latency.value == pytest.approx(worlds.GATHER_LATENCY_S, rel=0.02)
    for ctx, share in worlds.EFFICIENCY.items():
        assert gather.efficiency(ctx) == pytest.approx(share, rel=0.02)
    assert kernels["linear/twin/fp16"].latency is not None
    assert kernels["scan/twin/fp16"].latency is None
    assert kernels["select/twin/fp16"].efficiency is None


@pytest.mark.parametrize(
    ("metric", "tier", "probe"),
    [
        ("decode_select", "vram", "decode_select"),
        ("decode_gather", "vram", "decode_gather.vram"),
        ("decode_gather", "host", "decode_gather.host"),
    ],
)
def test_a_prediction_gives_the_calibrated_sample_back(tmp_path: Path, metric: str, tier: str, probe: str) -> None:
    profile = built(tmp_path)
    for sample in worlds.records()[probe].samples:
        if sample.at.get("budget", 2048) != 2048:
            continue
        at = {"tier": tier, "ctx_tokens": sample.at["ctx_tokens"], "layers": 1}
        case = Case(operation=metric, at=at)
        _, seconds, low, high = predict_case(case, profile, kv_dtype="fp16")
        assert seconds == pytest.approx(sample.median_s, rel=1e-3)
        assert low <= seconds <= high


def test_an_unknown_device_has_the_measured_rate_and_a_little_as_its_peak(tmp_path: Path) -> None:
    peak = built(tmp_path).gpu.vram_read.datasheet
    assert peak.value == pytest.approx(1.05 * worlds.VRAM)
    assert peak.source == "measured"
    assert "no data sheet" in peak.note


def test_a_known_device_has_its_data_sheet() -> None:
    known = worlds.machine(name="NVIDIA H200")
    profile, _ = build(machine=known, records=worlds.records(), name="toy", date="2026-11-29")
    assert profile["gpu"]["vram_read"]["datasheet"]["value"] == 4.8e12
    assert profile["gpu"]["tensor"]["fp16"]["datasheet"]["source"] == "datasheet"
    assert profile["gpu"]["h2d"]["datasheet"]["value"] == 63.0e9


def test_a_link_of_an_unknown_device_is_bounded_by_its_generation_and_width(tmp_path: Path) -> None:
    assert built(tmp_path).gpu.h2d.datasheet.value == pytest.approx(63.0e9, rel=0.001)


def test_a_rate_above_its_data_sheet_is_told_not_hidden() -> None:
    quick = {"vram_read": ProbeRecord(samples=(worlds.sample(2**30 / 9e12, moved=2**30, bytes=2**30),))}
    known = worlds.machine(name="NVIDIA H200")
    profile, _ = build(machine=known, records=worlds.records() | quick, name="toy", date="2026-11-29")
    peak = profile["gpu"]["vram_read"]["datasheet"]
    assert peak["value"] > 9e12
    assert "above" in peak["note"]


def test_without_a_needed_probe_there_is_no_profile() -> None:
    records = worlds.records()
    del records["vram_read"]
    with pytest.raises(CannotCalibrate, match="vram_read") as refused:
        build(machine=worlds.machine(), records=records, name="toy", date="2026-11-29")
    assert refused.value.exit_code == 2


def test_measurements_out_of_range_are_refused_by_their_key() -> None:
    slow = {"vram_read": ProbeRecord(samples=(worlds.sample(100.0, moved=2**30, bytes=2**30),))}
    with pytest.raises(CannotCalibrate, match=r"\$\.gpu\.vram_read"):
        build(machine=worlds.machine(), records=worlds.records() | slow, name="toy", date="2026-11-29")


def test_the_record_keeps_raw_samples_and_residuals() -> None:
    _, record = build(
        machine=worlds.machine(), records=worlds.records(), name="toy", date="2026-11-29", command="twin calibrate"
    )
    copy = record["probes"]["host_to_device_copy"]["samples"][0]
    assert copy["n"] == 5
    assert len(copy["seconds"]) == 5
    assert record["queue_start_s"] == pytest.approx(worlds.QUEUE_START_S, rel=1e-2)
    assert record["machine"]["driver"] == "1.2"
    assert record["command"] == "twin calibrate"
    assert {row["at"]["ctx_tokens"] for row in record["fitted"]["gather_host/twin/fp16"]} == set(worlds.CONTEXTS)
    json.dumps(record, allow_nan=False)


def cpu() -> Machine:
    """A CPU, whose memory is the host's."""
    return worlds.machine(device="cpu", compute_capability="0.0", smi={}, device_bytes=128 * 2**30)


def test_on_the_cpu_a_16_bit_type_is_bounded_by_the_better_of_its_own_and_fp32() -> None:
    records = worlds.records() | {
        "product.fp32": ProbeRecord(
            samples=(worlds.sample(1.0, flops=500e12, dtype="fp32", tokens=8, rows=8, columns=8),)
        )
    }
    profile, _ = build(machine=cpu(), records=records, name="toy", date="2026-11-29")
    assert profile["gpu"]["tensor"]["fp16"]["rate"]["value"] == pytest.approx(500e12)


def test_the_memory_of_a_cpu_is_the_hosts_and_that_of_a_gpu_is_not() -> None:
    for machine, unified in ((cpu(), True), (worlds.machine(), False)):
        profile, _ = build(machine=machine, records=worlds.records(), name="toy", date="2026-11-29")
        assert profile["gpu"].get("unified_memory", False) is unified
        assert checked(profile).gpu.shares_memory is unified

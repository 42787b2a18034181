"""Library kernels in a profile: rates put into samples come out, predictions give the samples back, parts add up."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from calibrate.build import build, checked
from calibrate.library_fits import layer_ops, library_key
from calibrate.probes import ProbeRecord, Sample
from hwprofiles import HardwareProfile
from tests.calibrate import library_worlds as library
from tests.calibrate import probe_worlds as worlds
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.roofline import Roofs
from twin.engines import load_engine
from twin.operations.ops import Engine, Op

KEYS = library.KEYS


def library_kernels(profile: HardwareProfile) -> set[str]:
    """Keys of kernels that are not this project's own."""
    return {key for key in profile.kernels if "/twin/" not in key}


def built(**changes: ProbeRecord) -> tuple[HardwareProfile, dict[str, Any]]:
    records = worlds.records() | library.probes() | changes
    profile, record = build(machine=worlds.machine(), records=records, name="toy", date="2026-11-29")
    return checked(profile), record


def changed(samples: list[Sample]) -> ProbeRecord:
    return ProbeRecord(samples=tuple(samples), took_s=1.0)


def latency(profile: HardwareProfile, key: str) -> float:
    found = profile.kernels[key].latency
    assert found is not None
    return found.value


def test_a_machine_without_library_probes_has_no_library_kernels() -> None:
    profile, record = build(machine=worlds.machine(), records=worlds.records(), name="toy", date="2026-11-29")
    assert not library_kernels(checked(profile))
    assert not record["fitted"].keys() & {*KEYS.values(), "layer_check"}


def test_a_kernel_is_named_after_whose_it_is() -> None:
    for operation, key in KEYS.items():
        assert library_key(operation, key.rpartition("/")[2]) == key


def test_skipped_probes_leave_the_others_their_kernels() -> None:
    missing = ProbeRecord(skipped="no flash attention here: sm75")
    profile, record = built(library_attend_dense=missing, library_attend_decode=missing, layer_check=missing)
    assert library_kernels(profile) == {KEYS[name] for name in ("linear", "elementwise", "append", "sample")}
    assert "layer_check" not in record["fitted"]


def test_a_type_without_a_measured_roof_is_left_out() -> None:
    profile, _ = built(tensor_bf16=ProbeRecord(skipped="late"))
    assert not library_kernels(profile)


def test_library_rates_come_out_as_they_went_in() -> None:
    profile, record = built()
    assert library_kernels(profile) == set(KEYS.values())
    curves: Mapping[str, Mapping[int, float]] = {
        "linear": library.LINEAR, "elementwise": library.BETWEEN, "append": library.APPEND,
        "attend_dense": library.DENSE, "attend_decode": {1: library.DECODE}, "sample": library.SAMPLE,
    }  # fmt: skip
    for name, shares in curves.items():
        curve = profile.kernels[KEYS[name]].efficiency
        assert curve is not None
        for at, share in shares.items():
            assert curve(at) == pytest.approx(share, rel=0.02), (name, at)
    assert profile.kernels[KEYS["linear"]].latency is None
    for name, seconds in (
        ("elementwise", library.BETWEEN_LATENCY_S), ("append", library.APPEND_LATENCY_S),
        ("attend_dense", library.DENSE_LATENCY_S), ("attend_decode", library.DECODE_LATENCY_S),
        ("sample", library.SAMPLE_LATENCY_S),
    ):  # fmt: skip
        assert latency(profile, KEYS[name]) == pytest.approx(seconds, rel=0.05)
    json.dumps(record, allow_nan=False)


def test_the_axes_are_those_of_the_schema() -> None:
    profile, _ = built()
    over = {key.split("/")[0]: kernel.efficiency.over for key, kernel in profile.kernels.items() if kernel.efficiency}
    assert over["linear"] == over["elementwise"] == over["append"] == over["sample"] == "tokens"
    assert (over["attend_dense"], over["attend_decode"]) == ("rows", "query_tokens")


@pytest.mark.parametrize("operation", KEYS)
def test_a_prediction_gives_the_calibrated_sample_back(operation: str) -> None:
    profile, _ = built()
    for sample in library.probes()[f"library_{operation}"].samples:
        op = Op(
            part="x", engine=Engine.SM, device=0, kernel=KEYS[operation], dtype="bf16",
            vram_bytes=sample.moved_bytes, flops=sample.flops,
            grain=float(sample.at.get("tokens", sample.at.get("rows", 1))),
        )  # fmt: skip
        assert Roofs(profile).cost(op).seconds == pytest.approx(sample.median_s, rel=0.01)


def test_noise_of_decode_attention_is_its_spread() -> None:
    noise = random.Random(3)  # noqa: S311
    points = [(batch, ctx) for batch in (1, 4, 16, 64) for ctx in (1024, 4096, 16384)]
    samples = []
    for point in points:
        sample = library.decode(*point)
        seconds = sample.median_s * noise.gauss(1.0, 0.05)
        samples.append(worlds.sample(seconds, moved=sample.moved_bytes, flops=sample.flops, **sample.at))
    profile, record = built(library_attend_decode=changed(samples))
    curve = profile.kernels[KEYS["attend_decode"]].efficiency
    assert curve is not None
    assert curve.at == (1.0,)
    assert curve.spread == pytest.approx(0.05, rel=0.5)
    assert len(record["fitted"][KEYS["attend_decode"]]) == len(points)


def test_what_beats_its_roof_is_capped_and_told() -> None:
    quick = [library.linear(1, 1.25), library.linear(8192, 0.9)]
    profile, record = built(library_linear=changed(quick))
    curve = profile.kernels[KEYS["linear"]].efficiency
    assert curve is not None
    assert curve.efficiency == pytest.approx((1.0, 0.9))
    assert record["fitted"][KEYS["linear"]][0]["residual"] == pytest.approx(0.25)
    assert curve.spread > 0.1


def test_one_size_of_attention_is_all_efficiency() -> None:
    profile, _ = built(library_attend_decode=changed([library.decode(64, 4096)]))
    kernel = profile.kernels[KEYS["attend_decode"]]
    assert kernel.latency is None
    assert kernel.efficiency is not None
    assert kernel.efficiency.efficiency[0] < library.DECODE


def test_sampling_hangs_on_no_operand_type() -> None:
    """Its logits are fp32 where the model computes in fp16 too: one kernel, as an engine's rulebook names it."""
    in_fp16 = [
        worlds.sample(sample.median_s, moved=sample.moved_bytes, **dict(sample.at) | {"dtype": "fp16"})
        for sample in library.probes()["library_sample"].samples
    ]
    profile, _ = built(library_sample=changed(in_fp16))
    assert library_kernels(profile) == set(KEYS.values())
    assert load_engine("vllm").kernel("sample", "fp32") == KEYS["sample"]


def test_kernels_have_the_keys_that_an_engine_asks_for() -> None:
    rules = load_engine("vllm")
    for operation in ("linear", "elementwise"):
        assert rules.kernel(operation, "bf16") == KEYS[operation]
    case = resolve(Question(ctx_tokens=64, model="llama-3.1-8b", engine="vllm", kv_dtype="bf16"))
    for operation in ("append", "attend_dense", "attend_decode"):
        assert case.attention_kernel(operation) == KEYS[operation]


def test_one_count_of_tokens_is_all_efficiency() -> None:
    few = [library.streamed(1, library.SHAPE.elementwise, library.BETWEEN_LATENCY_S, 0.4)]
    profile, _ = built(library_elementwise=changed(few))
    assert profile.kernels[KEYS["elementwise"]].latency is None


def test_the_parts_of_a_whole_layer_add_up_and_are_compared() -> None:
    _, record = built()
    decode, chunk = record["fitted"]["layer_check"]
    assert set(decode["parts_s"]) == {"linear", "elementwise", "append", "attend_decode"}
    assert set(chunk["parts_s"]) == {"linear", "elementwise", "append", "attend_dense"}
    assert decode["residual"] == pytest.approx(sum(decode["parts_s"].values()) / 1e-3 - 1)
    assert decode["parts_s"]["attend_decode"] == pytest.approx(library.decode(6, 3072).median_s, rel=0.01)


def test_a_whole_layer_counts_each_part_once() -> None:
    shape = library.SHAPE
    ops = {op.part: op for op in layer_ops(library.whole(batch=2, rows=1, past=99))}
    assert ops["linear"].vram_bytes == 2 * shape.parameters
    assert ops["linear"].flops == 2 * 2 * shape.parameters
    assert ops["attend_decode"].vram_bytes == 2 * 2 * 100 * 1024 * 2
    assert ops["elementwise"].grain == ops["append"].grain == 2
    chunk = {op.part: op for op in layer_ops(library.whole(batch=1, rows=8, past=4))}
    assert chunk["attend_dense"].grain == 8
    assert chunk["attend_dense"].flops == 4 * 4096 * (8 * 4 + 36)

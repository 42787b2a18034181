"""Rates of format kernels: what was put into samples comes out, and the form is the one that predicts left-out ones."""

import json
import random
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.build import build, checked
from calibrate.format_fits import _folds
from calibrate.format_forms import Sampled, straightened
from calibrate.probes import ProbeRecord, Sample
from hwprofiles import HardwareProfile
from hwprofiles.rates import Curve
from tests.calibrate import format_worlds as formats
from tests.calibrate import probe_worlds as worlds
from twin.format_ops import decode_op, format_case
from twin.roofline import Roofs

PLAIN, CODED, LIGHT = "attend_decode/twin/bf16", "attend_decode/twin/int4_per_token_head", "attend_decode/twin/fp8"


def built(**changes: ProbeRecord) -> tuple[HardwareProfile, dict[str, Any]]:
    profile, record = build(machine=worlds.machine(), records=formats.records(**changes), name="toy", date="2026-11-29")
    json.dumps(record, allow_nan=False)
    return checked(profile), record


@pytest.fixture(scope="module")
def toy() -> tuple[HardwareProfile, dict[str, Any]]:
    return built()


def efficiency(profile: HardwareProfile, key: str) -> Curve:
    curve = profile.kernels[key].efficiency
    assert curve is not None
    return curve


def predicted(profile: HardwareProfile, name: str, ctx: int, batch: int, tokens: int) -> float:
    op = decode_op(format_case(name), ctx_tokens=ctx, batch=batch, query_tokens=tokens)
    return Roofs(profile).cost(op).seconds


def test_a_machine_without_format_probes_has_no_such_kernels() -> None:
    profile, record = build(machine=worlds.machine(), records=worlds.records(), name="toy", date="2026-11-29")
    assert not [key for key in profile["kernels"] if key.startswith(("attend_decode/", "append/"))]
    assert "instructions" not in profile["gpu"]
    assert not [key for key in record["fitted"] if key.startswith("attend_decode/")]


def test_the_rate_of_instructions_is_a_roof_under_its_data_sheet() -> None:
    smi = {"clocks.max.sm": "1980"}
    machine = worlds.machine(smi=smi, sm_count=132)
    profile, _ = build(machine=machine, records=formats.records(), name="toy", date="2026-11-29")
    roof = profile["gpu"]["instructions"]
    assert (roof["rate"]["value"], roof["rate"]["unit"]) == (pytest.approx(formats.INSTRUCTIONS), "op/s")
    assert roof["datasheet"]["value"] == 132 * 64 * 1980e6
    assert roof["datasheet"]["source"] == "datasheet"


def test_above_the_data_sheet_the_measurement_is_the_peak() -> None:
    machine = worlds.machine(smi={"clocks.max.sm": "100"}, sm_count=1)
    profile, _ = build(machine=machine, records=formats.records(), name="toy", date="2026-11-29")
    sheet = profile["gpu"]["instructions"]["datasheet"]
    assert sheet["value"] == pytest.approx(1.05 * formats.INSTRUCTIONS)
    assert "above" in sheet["note"]


@pytest.mark.parametrize("name", formats.DECODING)
def test_a_prediction_gives_the_calibrated_samples_back(toy: tuple[HardwareProfile, dict[str, Any]], name: str) -> None:
    for point in formats.POINTS:
        assert predicted(toy[0], name, *point) == pytest.approx(formats.seconds(name, *point), rel=0.01), point


@pytest.mark.parametrize("name", formats.DECODING)
@pytest.mark.parametrize("ctx", [6_145, 24_576, 98_306, 196_608])
@pytest.mark.parametrize("batch", [1, 3, 12])
def test_it_holds_where_nothing_was_calibrated(
    toy: tuple[HardwareProfile, dict[str, Any]], name: str, ctx: int, batch: int
) -> None:
    for tokens in (1, 2, 6, 12, 32):
        assert predicted(toy[0], name, ctx, batch, tokens) == pytest.approx(
            formats.seconds(name, ctx, batch, tokens), rel=0.02
        )


def test_a_kernel_held_by_taking_codes_apart_says_how_many_operations_that_takes(
    toy: tuple[HardwareProfile, dict[str, Any]],
) -> None:
    kernel = toy[0].kernels[CODED]
    assert kernel.decoding is not None
    assert kernel.decoding.value == pytest.approx(formats.DECODING["int4_per_token_head"], rel=0.02)
    assert kernel.decoding.unit == "1"
    assert efficiency(toy[0], CODED)(1) == pytest.approx(efficiency(toy[0], PLAIN)(1), rel=1e-6)
    op = decode_op(format_case("int4_per_token_head"), ctx_tokens=131_072, batch=1, query_tokens=1)
    assert Roofs(toy[0]).cost(op).wall == "decode"


def test_a_kernel_that_is_not_held_by_codes_claims_no_operations(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    for key in (PLAIN, LIGHT):
        assert toy[0].kernels[key].decoding is None
        assert efficiency(toy[0], key)(1) == pytest.approx(formats.READ, rel=0.01)
        assert efficiency(toy[0], key)(32) == pytest.approx(formats.PRODUCTS, rel=0.01)


def test_latencies_come_out(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    for key in (PLAIN, CODED):
        kernel = toy[0].kernels[key]
        assert kernel.latency is not None
        assert kernel.latency_each is not None
        assert kernel.latency.value == pytest.approx(formats.LATENCY_S, rel=0.02)
        assert kernel.latency_each.value == pytest.approx(formats.EACH_S, rel=0.05)


def test_without_a_rate_of_instructions_all_is_efficiency() -> None:
    profile, record = built(instructions=ProbeRecord(skipped="no lop3 here"))
    assert profile.gpu.instructions is None
    assert profile.kernels[CODED].decoding is None
    assert not [form for form in record["fitted"][f"{CODED}#left_out"] if form.startswith("decoding")]
    for point in formats.POINTS:
        assert predicted(profile, "int4_per_token_head", *point) == pytest.approx(
            formats.seconds("int4_per_token_head", *point), rel=0.05
        )


def test_the_spread_is_that_of_noise() -> None:
    noisy = {f"format_decode_{name}": formats.decode(name, noise=0.03) for name in formats.DECODING}
    profile, record = built(**noisy)
    for key in (PLAIN, CODED):
        assert 0.01 <= efficiency(profile, key).spread <= 0.12
        rows = record["fitted"][key]
        assert len(rows) == len(formats.POINTS)
        assert [row for row in rows if "left_out" in row]


def test_a_term_that_brings_nothing_is_not_kept() -> None:
    def earlier(sample: Sample) -> Sample:
        less = formats.EACH_S * int(sample.at["query_tokens"])
        return replace(sample, seconds=tuple(second - less for second in sample.seconds))

    flat = ProbeRecord(samples=tuple(map(earlier, formats.decode("bf16").samples)), took_s=1.0)
    profile, _ = built(format_decode_bf16=flat)
    each = profile.kernels[PLAIN].latency_each
    assert each is None or each.value < 0.1 * formats.EACH_S


def test_an_arrangement_of_its_own_has_an_entry_of_its_own() -> None:
    points = formats.POINTS[:5]
    formats.DECODING["int8_per_token_head"] = 0.0
    try:
        profile, _ = built(
            format_decode_int8_per_token_head=formats.decode("int8_per_token_head"),
            format_decode_int8_per_token_head_inline=formats.decode(
                "int8_per_token_head", points, inline=True, slower=1.3
            ),
        )
    finally:
        del formats.DECODING["int8_per_token_head"]
    own, inline = (
        Roofs(profile)
        .cost(decode_op(format_case("int8_per_token_head", inline=lies), ctx_tokens=131_072, batch=1, query_tokens=1))
        .seconds
        for lies in (False, True)
    )
    assert inline / own == pytest.approx(1.3, rel=0.02)


def test_a_format_without_samples_is_left_out_and_the_others_stay() -> None:
    profile, _ = built(format_decode_fp8=ProbeRecord(skipped="the kernel of fp8 is not there"))
    assert LIGHT not in profile.kernels
    assert {PLAIN, CODED} <= set(profile.kernels)


def test_a_few_points_make_a_profile_too() -> None:
    for count in (1, 2, 3):
        few = {f"format_decode_{name}": formats.decode(name, formats.POINTS[:count]) for name in formats.DECODING}
        profile, _ = built(**few)
        for name in formats.DECODING:
            for point in formats.POINTS[:count]:
                assert predicted(profile, name, *point) == pytest.approx(formats.seconds(name, *point), rel=0.05)


def test_appending_has_a_latency_and_a_share_of_the_memory(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    for name in formats.DECODING:
        kernel = toy[0].kernels[f"append/twin/{name}"]
        assert kernel.latency is not None
        assert kernel.latency.value == pytest.approx(formats.APPEND_LATENCY_S, rel=0.02)
        assert kernel.efficiency is not None
        assert kernel.efficiency(512) == pytest.approx(formats.APPEND, rel=0.02)


def test_a_number_of_query_tokens_that_no_other_sample_has_is_left_out_only_between_others() -> None:
    op = decode_op(format_case("bf16"), ctx_tokens=8_192, batch=1, query_tokens=1)
    points = [Sampled(op=replace(op, grain=grain), seconds=1.0) for grain in (1, 1, 4, 16, 16, 32)]
    assert list(_folds(points)) == [{0}, {1}, {3}, {4}, {2}, {3, 4}]


def test_a_curve_keeps_the_points_that_interpolation_needs() -> None:
    assert straightened({1.0: 0.5, 2.0: 0.5, 3.0: 0.5}) == {1.0: 0.5}
    bent = {float(at): min(1.0, 4 / at) for at in range(1, 33)}
    kept = straightened(bent)
    assert {1.0, 4.0, 32.0} <= set(kept)
    assert len(kept) < len(bent)
    curve = Curve(
        over="query_tokens", at=tuple(kept), efficiency=tuple(kept.values()), spread=0, n=1, source="measured",
        date="2026-11-29",
    )  # fmt: skip
    for at, share in bent.items():
        assert curve(at) == pytest.approx(share, rel=2e-3)


def test_chance_alone_does_not_choose_a_form(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    """The same samples give the same rates, whatever was drawn before."""
    random.seed(7)
    again, _ = built()
    assert again.kernels[CODED] == toy[0].kernels[CODED]

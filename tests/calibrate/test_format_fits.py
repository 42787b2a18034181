"""Rates of format kernels: what was put into samples comes out, and the form is the one that predicts left-out ones."""

import json
import random
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.build import build, checked
from calibrate.format_fits import _folds
from calibrate.format_forms import Sampled
from calibrate.probes import ProbeRecord
from hwprofiles import HardwareProfile
from hwprofiles.rates import Curve
from tests.calibrate import format_worlds as formats
from tests.calibrate import probe_worlds as worlds
from twin.cost.roofline import Roofs
from twin.operations.format_ops import decode_op, format_case

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


def test_operations_an_element_come_out(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    for name, key in (("bf16", PLAIN), ("int4_per_token_head", CODED), ("fp8", LIGHT)):
        counts = toy[0].kernels[key].operations
        assert counts is not None
        assert counts(counts.at[-1]) == pytest.approx(
            formats.DECODING[name] + formats.OF_A_ROW * counts.at[-1], rel=0.02
        )
    op = decode_op(format_case("int4_per_token_head"), ctx_tokens=131_072, batch=1, query_tokens=1)
    assert Roofs(toy[0]).cost(op).wall == "decode"


def test_reads_and_latencies_come_out(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    for key in (PLAIN, CODED):
        kernel = toy[0].kernels[key]
        assert kernel.latency is not None
        assert kernel.combine is not None
        assert kernel.latency.value == pytest.approx(formats.LATENCY_S, rel=0.05)
        assert kernel.combine.value == pytest.approx(formats.MERGING, rel=0.1)
        assert efficiency(toy[0], key)(1) == pytest.approx(formats.READ, rel=0.02)


def test_a_number_for_each_kind_of_program_is_kept_only_where_no_line_will_do() -> None:
    """Programs of 32 rows that take half as long again lie on no line between those of 16 and 48."""
    slow = []
    for sample in formats.decode("fp8").samples:
        at = {name: int(sample.at[name]) for name in ("ctx_tokens", "batch", "query_tokens")}
        op = decode_op(format_case("fp8"), **at)
        assert op.split_kv is not None
        more = 1.5 if op.split_kv.q_rows == 32 else 1.0
        slow.append(replace(sample, seconds=tuple(more * second for second in sample.seconds)))
    points = [(ctx, batch, 4) for ctx in (16_384, 65_536, 131_072) for batch in (2, 8)]
    for sample in formats.decode("fp8", points).samples:
        slow.append(replace(sample, seconds=tuple(1.5 * second for second in sample.seconds)))
    bent, record = built(format_decode_fp8=ProbeRecord(samples=tuple(slow), took_s=1.0))
    counts = bent.kernels[LIGHT].operations
    assert counts is not None
    assert "a number for each" in counts.note
    straight, _ = built()
    line = straight.kernels[LIGHT].operations
    assert line is not None
    assert "more for each query row" in line.note
    assert set(record["fitted"][f"{LIGHT}#left_out"]) == {"operations", "rows"}


def test_without_a_rate_of_instructions_all_is_efficiency() -> None:
    profile, record = built(instructions=ProbeRecord(skipped="no lop3 here"))
    assert profile.gpu.instructions is None
    assert (profile.kernels[CODED].operations, profile.kernels[CODED].combine) == (None, None)
    assert list(record["fitted"][f"{CODED}#left_out"]) == ["efficiency"]
    for ctx, batch, tokens in ((131072, 1, 1), (131072, 8, 1), (131072, 1, 32)):
        assert predicted(profile, "int4_per_token_head", ctx, batch, tokens) == pytest.approx(
            formats.seconds("int4_per_token_head", ctx, batch, tokens), rel=0.3
        )


def test_the_spread_is_that_of_noise() -> None:
    noisy = {f"format_decode_{name}": formats.decode(name, noise=0.03) for name in formats.DECODING}
    profile, record = built(**noisy)
    for key in (PLAIN, CODED):
        assert 0.01 <= efficiency(profile, key).spread <= 0.12
        rows = record["fitted"][key]
        assert len(rows) == len(formats.POINTS)
        assert [row for row in rows if "left_out" in row]


def test_an_arrangement_of_its_own_has_an_entry_of_its_own() -> None:
    points = formats.POINTS[:5]
    formats.DECODING["int8_per_token_head"] = 0.0
    try:
        profile, _ = built(
            format_decode_int8_per_token_head=formats.decode("int8_per_token_head"),
            format_decode_int8_per_token_head_inline=formats.decode(
                "int8_per_token_head", points, inline=True, slower=1.1
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
    assert inline / own == pytest.approx(1.1, rel=0.02)


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


def test_only_samples_of_whose_kind_there_are_others_are_left_out() -> None:
    op = decode_op(format_case("bf16"), ctx_tokens=8_192, batch=1, query_tokens=1)
    assert op.split_kv is not None
    points = [
        Sampled(op=replace(op, split_kv=replace(op.split_kv, q_rows=rows)), seconds=1.0)
        for rows in (16, 16, 32, 48, 48)
    ]
    assert list(_folds(points)) == [0, 1, 3, 4]


def test_chance_alone_does_not_choose_a_form(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    """The same samples give the same rates, whatever was drawn before."""
    random.seed(7)
    again, _ = built()
    assert again.kernels[CODED] == toy[0].kernels[CODED]

"""Published measurements: each asks about things that are shipped, and none is faster than the machine's memory."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hwprofiles import load_profile, profile_names
from hwprofiles.files import read_json
from twin.models import load_model

FOLDER = Path(__file__).parents[2] / "hwprofiles" / "records" / "public"
ROWS: list[Any] = [row for name in ("engines", "serving") for row in read_json(FOLDER / f"{name}.json")]
CURVES: list[Any] = [
    curve
    for name in ("kernels_vllm", "kernels_sglang", "links")
    for curve in read_json(FOLDER / f"{name}.json")["curves"]
]
GIB = 2**30
DATASHEET = 1.02  # the most by which a data sheet rounds the memory's bytes a second down


def test_no_two_measurements_have_one_name() -> None:
    for group in (ROWS, CURVES):
        names = [one["id"] for one in group]
        assert len(set(names)) == len(names)


def test_every_measurement_asks_of_a_shipped_machine() -> None:
    asked = {row["ask"]["hw"] for row in ROWS} | {curve["machine"] for curve in CURVES}
    assert asked <= set(profile_names())


@pytest.mark.parametrize("model", sorted({row["ask"]["model"] for row in ROWS}))
def test_every_measurement_asks_of_a_model_that_is_there(model: str) -> None:
    assert load_model(str(FOLDER / model) if model.endswith(".json") else model).layers


def test_what_is_asked_is_what_was_measured() -> None:
    for row in ROWS:
        depth, tokens, ask = row["depth"], row["tokens"], row["ask"]
        between = depth + tokens // 2 if row["metric"] == "decode_tok_s" else depth + tokens
        assert (ask["ctx_tokens"], ask["batch"], row["figure"]) == (between, row["batch"], row["metric"]), row["id"]
        assert row["value"] > 0, row["id"]
        assert row["source"], row["id"]
        assert ask.get("from_tokens", 0) == (depth if row["kind"] == "prefill_chunk" else 0), row["id"]


def test_no_dense_model_decodes_faster_than_its_weights_are_read() -> None:
    dense = [row for row in ROWS if row["metric"] == "decode_tok_s" and row["model"]["name"].startswith("llama")]
    read = [row for row in dense if row["batch"] == 1 and "weight_bytes_gib" in row["model"]]
    assert len(read) > 100
    for row in read:
        roof = load_profile(row["ask"]["hw"]).gpu.vram_read.datasheet.value
        assert row["model"]["weight_bytes_gib"] * GIB * row["value"] <= roof * DATASHEET, row["id"]


def test_a_curve_is_a_time_for_each_point_in_order() -> None:
    for curve in CURVES:
        points, seconds = curve["points"], curve["seconds"]
        assert len(points) == len(seconds) > 1, curve["id"]
        assert all(one < other for one, other in pairwise(points)), curve["id"]
        assert min(seconds) > 0, curve["id"]


def test_a_cold_cache_is_not_read_faster_than_memory() -> None:
    bytes_of = {"bf16": 2, "fp8": 1}
    cold = [curve for curve in CURVES if curve["operation"] == "attend_decode" and curve["cold_from"] is not None]
    assert cold
    for curve in cold:
        shape, roof = curve["shape"], load_profile(curve["machine"]).gpu.vram_read.datasheet.value
        token = shape["batch"] * shape["kv_heads"] * shape["head_dim"] * 2 * bytes_of[curve["format"]]
        for point, seconds in zip(curve["points"], curve["seconds"], strict=True):
            if point >= curve["cold_from"]:
                assert point * token / seconds <= roof * DATASHEET, curve["id"]

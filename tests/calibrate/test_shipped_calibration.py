"""The shipped H200: its profile is what its records' raw samples make; whole layers are the sum of their parts."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from calibrate.build import Evidence, build
from calibrate.library_fits import library_rates
from calibrate.probes import Machine, ProbeRecord
from hwprofiles import load_profile
from hwprofiles.store import DATA

MACHINE = "h200"
DERIVED = ("median_s", "spread", "n")
"""What a record holds beside a sample's raw seconds."""

LAYER_TOLERANCE = 0.15
"""Largest distance of a whole layer from the sum of its parts, at points that no part was fitted on."""


def read(name: str) -> dict[str, Any]:
    """A data file of the machine."""
    data: dict[str, Any] = json.loads((DATA / MACHINE / name).read_text(encoding="utf-8"))
    return data


def format_rates() -> dict[str, Any]:
    """The record of the kernels over cache formats, measured on their own; empty where there is none yet."""
    return read("format_rates.json") if (DATA / MACHINE / "format_rates.json").exists() else {"kernels": {}, "gpu": {}}


def probes(record: dict[str, Any]) -> dict[str, ProbeRecord]:
    """The raw samples of a record."""
    found = {}
    for name, probe in record["probes"].items():
        samples = [{key: value for key, value in sample.items() if key not in DERIVED} for sample in probe["samples"]]
        found[name] = msgspec.convert(probe | {"samples": samples}, ProbeRecord)
    return found


def differences(one: Any, other: Any, path: str = "$", *, rel: float = 1e-9) -> Iterator[str]:
    """Places where two JSON values are not the same, numbers within `rel`."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from (f"{path}.{key}" for key in one.keys() ^ other.keys())
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{path}.{key}", rel=rel)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield path
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from differences(left, right, f"{path}[{index}]", rel=rel)
    elif isinstance(one, float) or isinstance(other, float):
        if one != pytest.approx(other, rel=rel, abs=1e-3 * rel):
            yield path
    elif one != other:
        yield path


@pytest.fixture(scope="module")
def rebuilt() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(profile built from the shipped record, record built with it, the shipped record)."""
    shipped = read("calibration.json")
    profile, record = build(
        machine=msgspec.convert(shipped["machine"], Machine),
        records=probes(shipped),
        name=shipped["name"],
        date=shipped["date"],
        command=shipped["command"],
    )
    return json.loads(json.dumps(profile)), json.loads(json.dumps(record)), shipped


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    """The record of the library kernels, which were measured on their own."""
    return read("library_suite.json")


def test_the_profile_is_what_its_calibrations_make(
    rebuilt: tuple[dict[str, Any], dict[str, Any], dict[str, Any]], suite: dict[str, Any]
) -> None:
    own, formats = rebuilt[0]["kernels"], format_rates()
    assert not own.keys() & suite["kernels"].keys()
    made = rebuilt[0] | {"kernels": own | suite["kernels"] | formats["kernels"]}
    made["gpu"] |= formats["gpu"]
    assert list(differences(made, read("profile.json"))) == []


def test_library_kernels_are_what_their_raw_samples_make(suite: dict[str, Any]) -> None:
    """Over the roofs of the profile, which the calibration measured."""
    shipped, records = read("calibration.json"), probes(suite)
    machine = msgspec.convert(shipped["machine"], Machine)
    evidence = Evidence(machine=machine, records=records, date=shipped["date"])
    kernels, fitted = library_rates(records, load_profile(MACHINE), evidence.provenance)
    assert list(differences(json.loads(json.dumps(kernels)), suite["kernels"])) == []
    assert list(differences(json.loads(json.dumps(fitted)), suite["fitted"])) == []


def test_every_library_probe_ran_to_its_end_and_was_checked(suite: dict[str, Any]) -> None:
    for name, record in probes(suite).items():
        assert record.samples, name
        assert (record.skipped, record.left_out) == ("", 0)
        assert all("relative error" in sample.checked for sample in record.samples)


def test_whole_layers_take_what_their_parts_add_up_to(suite: dict[str, Any]) -> None:
    layers = suite["fitted"]["layer_check"]
    assert {(row["at"]["rows"] == 1, row["at"]["past_tokens"] > 0) for row in layers} >= {(True, True), (False, False)}
    for row in layers:
        total = sum(row["parts_s"].values())
        assert row["residual"] == pytest.approx(total / row["measured_s"] - 1, abs=1e-9)
        assert abs(total / row["measured_s"] - 1) <= LAYER_TOLERANCE, row["at"]


def test_no_part_was_fitted_at_the_points_of_a_whole_layer(suite: dict[str, Any]) -> None:
    points = {
        name: {tuple(row["at"][key] for key in ("batch", "rows", "past_tokens")) for row in rows}
        for name, rows in suite["fitted"].items()
        if "attend" in name or name == "layer_check"
    }
    whole = points.pop("layer_check")
    assert len(points) == 2
    assert not whole & set().union(*points.values())


def test_the_record_s_residuals_and_medians_are_those_of_its_raw_samples(
    rebuilt: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    _, record, shipped = rebuilt
    assert record.keys() <= shipped.keys()
    computed = record.keys() - {"machine"}
    assert list(differences({key: record[key] for key in computed}, {key: shipped[key] for key in computed})) == []


def test_the_record_of_a_machine_does_not_say_which_card_it_was(
    rebuilt: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    assert rebuilt[1]["machine"]["device_id"] == ""
    assert rebuilt[2]["machine"]["device_id"] == ""

"""The shipped H200: its profile is what its calibration makes of the raw samples in its record."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from calibrate.build import build
from calibrate.probes import Machine, ProbeRecord
from hwprofiles.store import DATA

MACHINE = "h200"
DERIVED = ("median_s", "spread", "n")
"""What a record holds beside a sample's raw seconds."""


def differences(one: Any, other: Any, path: str = "$") -> Iterator[str]:
    """Places where two JSON values are not the same, numbers within 1e-9."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from (f"{path}.{key}" for key in one.keys() ^ other.keys())
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield path
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from differences(left, right, f"{path}[{index}]")
    elif isinstance(one, float) or isinstance(other, float):
        if one != pytest.approx(other, rel=1e-9, abs=1e-12):
            yield path
    elif one != other:
        yield path


@pytest.fixture(scope="module")
def rebuilt() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(profile built from the shipped record, record built with it, the shipped record)."""
    shipped = json.loads((DATA / MACHINE / "calibration.json").read_text(encoding="utf-8"))
    records = {}
    for name, probe in shipped["probes"].items():
        samples = [{key: value for key, value in sample.items() if key not in DERIVED} for sample in probe["samples"]]
        records[name] = msgspec.convert(probe | {"samples": samples}, ProbeRecord)
    profile, record = build(
        machine=msgspec.convert(shipped["machine"], Machine),
        records=records,
        name=shipped["name"],
        date=shipped["date"],
        command=shipped["command"],
    )
    return json.loads(json.dumps(profile)), json.loads(json.dumps(record)), shipped


def test_the_profile_is_what_its_calibration_makes(
    rebuilt: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> None:
    shipped = json.loads((DATA / MACHINE / "profile.json").read_text(encoding="utf-8"))
    assert list(differences(rebuilt[0], shipped)) == []


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

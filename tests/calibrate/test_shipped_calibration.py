"""The shipped H200: every library kernel was measured and checked, and whole layers are the sum of their parts."""

from typing import Any

import pytest

from calibrate.refit import FORMATS, LIBRARY, OWN, probes
from hwprofiles.files import read_json
from hwprofiles.store import RECORDS

MACHINE = "h200"
LAYER_TOLERANCE = 0.15
"""Largest distance of a whole layer from the sum of its parts, at points that no part was fitted on."""


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    """The record of the library kernels, which were measured on their own."""
    document: dict[str, Any] = read_json(RECORDS / MACHINE / LIBRARY)
    return document


def test_whole_layers_take_what_their_parts_add_up_to(suite: dict[str, Any]) -> None:
    layers = suite["fitted"]["layer"]
    assert {(row["at"]["q_tokens"] == 1, row["at"]["past_tokens"] > 0) for row in layers} >= {
        (True, True),
        (False, False),
    }
    for row in layers:
        total = sum(row["parts_s"].values())
        assert row["residual"] == pytest.approx(total / row["measured_s"] - 1, abs=1e-9)
        assert abs(total / row["measured_s"] - 1) <= LAYER_TOLERANCE, row["at"]


@pytest.mark.parametrize("name", [LIBRARY, *FORMATS])
def test_every_probe_of_a_kernel_ran_to_its_end_and_was_checked(name: str) -> None:
    for probe, record in probes(read_json(RECORDS / MACHINE / name)).items():
        assert record.samples, probe
        assert (record.skipped, record.left_out) == ("", 0), probe
        assert all(sample.checked for sample in record.samples)


def test_no_record_says_which_card_it_was() -> None:
    for name in (OWN, *FORMATS):
        assert read_json(RECORDS / MACHINE / name)["machine"]["device_id"] == ""

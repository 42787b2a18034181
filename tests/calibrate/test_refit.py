"""Rates follow from samples alone: not from their last bits, not from their order, not from where a search began."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.probes import ProbeRecord
from calibrate.refit import PROFILE, Records, main, rate_records, refitted
from hwprofiles import load_profile
from hwprofiles.files import read_json
from hwprofiles.store import RECORDS, shipped_document
from tests.calibrate.test_fit import fitted, records_of

MACHINE = "h200"
SEEDS = range(3)
"""Each of them moves every sample and changes the order of all."""

JITTER = 1e-12
"""Relative change of every sample: what another processor's last bit may be."""

EQUAL = 1e-6
"""Relative difference of rates, and difference of relative residuals, up to which two fits are the same."""

LIKE_RESIDUALS = ("residual", "left_out")


def differences(one: Any, other: Any, path: str = "$") -> Iterator[str]:
    """Places where two JSON values are not the same: numbers to EQUAL of themselves, relative residuals to EQUAL."""
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
        least = EQUAL if path.endswith(LIKE_RESIDUALS) or "#left_out" in path else 0.0
        if one != pytest.approx(other, rel=EQUAL, abs=least):
            yield f"{path}: {one} {other}"
    elif one != other:
        yield f"{path}: {one} {other}"


def rates_of(profile: dict[str, Any]) -> dict[str, Any]:
    """What a fit sets."""
    return {part: profile[part] for part in ("gpu", "host", "kernels")}


def disturbed(seed: int) -> Callable[[Records], Records]:
    """Every sample a last bit off, in another order."""
    chance = random.Random(seed)  # noqa: S311

    def change(records: Records) -> Records:
        changed: dict[str, ProbeRecord] = {}
        for name, record in records.items():
            samples = [
                replace(sample, seconds=tuple(s * (1 + JITTER * chance.uniform(-1, 1)) for s in sample.seconds))
                for sample in record.samples
            ]
            chance.shuffle(samples)
            changed[name] = replace(record, samples=tuple(samples))
        return changed

    return change


@pytest.fixture(scope="module")
def again() -> dict[str, dict[str, Any]]:
    """The shipped samples, fitted here and now."""
    return refitted(MACHINE)


def test_every_shipped_rate_and_residual_is_what_the_raw_samples_make(again: dict[str, dict[str, Any]]) -> None:
    for name, document in again.items():
        shipped = shipped_document(MACHINE) if name == PROFILE else read_json(RECORDS / MACHINE / name)
        assert list(differences(document, shipped)) == [], name
    moved = json.loads(json.dumps(rates_of(again[PROFILE])))
    moved["kernels"]["attend_decode/twin/bf16"]["latency"]["value"] *= 1 + 3 * EQUAL
    (found,) = differences(moved, rates_of(again[PROFILE]))  # what moves is found
    assert found.startswith("$.kernels.attend_decode/twin/bf16.latency.value")


@pytest.mark.parametrize("seed", SEEDS)
def test_rates_hang_neither_on_last_bits_nor_on_order(again: dict[str, dict[str, Any]], seed: int) -> None:
    other = refitted(MACHINE, disturbed(seed))
    assert list(differences(rates_of(other[PROFILE]), rates_of(again[PROFILE]))) == []


def test_the_same_holds_where_nothing_is_known_of_thread_blocks() -> None:
    """As on a processor, which has no rate of instructions, with noise of 3 %."""
    chance, truth = random.Random(5), load_profile(MACHINE)  # noqa: S311
    records = records_of(truth, change=lambda _operation, _point, time: time * chance.gauss(1, 0.03))
    one, *others = (
        json.loads(msgspec.json.encode(fitted(truth, dict(samples), instructions=None)[0].kernels))
        for samples in (records, *(disturbed(seed)(records) for seed in SEEDS))
    )
    for other in others:
        assert list(differences(other, one)) == []


def test_records_of_chosen_operations_are_taken_by_their_dates(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    dates = {"b_rates.json": "2026-12-01", "a_rates.json": "2026-12-01", "z_rates.json": "2026-11-30", "suite.json": ""}
    (tmp_path / MACHINE).mkdir()
    for name, date in dates.items():
        (tmp_path / MACHINE / name).write_text(json.dumps({"date": date}), encoding="utf-8")
    monkeypatch.setattr("calibrate.refit.RECORDS", tmp_path)
    assert list(rate_records(MACHINE)) == ["z_rates.json", "a_rates.json", "b_rates.json"]


def test_the_command_writes_every_file(
    again: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    shutil.copytree(RECORDS / MACHINE, tmp_path / MACHINE)
    shipped: list[dict[str, Any]] = []
    monkeypatch.setattr("calibrate.refit.RECORDS", tmp_path)
    monkeypatch.setattr("calibrate.refit.ship", shipped.append)
    monkeypatch.setattr("calibrate.refit.refitted", lambda _machine: again)
    main(MACHINE)
    assert shipped == [again[PROFILE]]
    for name in again.keys() - {PROFILE}:
        assert json.loads((tmp_path / MACHINE / name).read_text(encoding="utf-8")) == again[name]

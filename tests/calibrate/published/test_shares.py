"""Shares and latencies of engines from rows: a made-up engine's are found again, and shipped ones are those found."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from calibrate.published import shares
from calibrate.published.curves import KernelRow
from calibrate.published.shares import (
    DATE,
    FEW_TAU,
    KNOWN,
    LATENCY_TAU,
    LEAST_SPREAD,
    MANY_TAU,
    NOISE,
    Parameter,
    beside_kernels_s,
    document_of,
    fit,
    known_kernels,
    launches,
    left_out,
    main,
    on_machine,
    products,
    served,
    spreads_of,
    told,
)
from calibrate.published.speeds import speed_rows
from hwprofiles import HardwareProfile
from hwprofiles.profile import Kernel
from hwprofiles.store import KERNELS
from tests.worlds import BYTES_PER_S, curve, kernel, machine
from twin.cost.roofline import Roofs
from twin.operations.ops import Op

KEY = "linear/toy/bf16"
SHARES = products("toy", "bf16", places={1.0: 0.9, 64.0: 0.5})
TOY = (*SHARES, *launches("toy", "bf16"))
TRUE = {"one": (0.8, 0.4, 2e-4), "two": (0.7, 0.3, 1e-4), "three": (0.6, 0.5, 4e-4)}
"""By machine: share of one token, of 64, and latency."""


def there(name: str) -> HardwareProfile:
    return replace(machine(), name=name)


def row(where: HardwareProfile, own: Kernel, tokens: float, vram_bytes: float, *, of: str = "c") -> KernelRow:
    """A call of that many tokens, in the seconds that the kernel takes."""
    op = Op("weights", 0, kernel=KEY, vram_bytes=vram_bytes, grain=tokens)
    seconds = Roofs(replace(where, kernels={KEY: own})).cost(op).seconds
    name = f"{of}-{tokens:g}-{vram_bytes:g}-{where.name}"
    return KernelRow(name, f"{of} {where.name}", "toy.json", "toy", where, op, seconds)


def rows_of(name: str, curves: Iterable[str] = "abcd") -> list[KernelRow]:
    """Four curves of a machine, over tokens and over bytes."""
    few, many, latency_s = TRUE[name]
    own, where = kernel(efficiency=curve((1, 64), (few, many)), latency_s=latency_s), there(name)
    return [
        row(where, own, tokens, size * BYTES_PER_S, of=each)
        for each, tokens in zip(curves, (1.0, 8.0, 64.0, 256.0), strict=False)
        for size in (1e-5, 1e-3, 1e-1)
    ]


ROWS = [each for name in TRUE for each in rows_of(name)]


def test_shares_and_latencies_that_made_the_rows_are_found_again() -> None:
    fitted = fit(TOY, ROWS)
    for name, true in TRUE.items():
        assert np.exp(fitted.machines[name]) == pytest.approx(true, rel=0.03)
    means = [math.prod(own) ** (1 / 3) for own in zip(*TRUE.values(), strict=True)]
    assert np.exp(fitted.mean) == pytest.approx(means, rel=0.05)
    errors = left_out(TOY, ROWS, fitted)
    assert errors.keys() == {each.id for each in ROWS}
    assert np.median(np.abs(list(errors.values()))) < 0.05


def test_a_row_moves_a_machine_as_far_as_machines_differ_more_than_figures_do() -> None:
    """Of a share, with spreads a and b: a^2 / (a^2 + b^2) of the way; the rest is the mean's."""
    slow = row(there("one"), kernel(efficiency=curve(efficiency=(0.4,))), 1, BYTES_PER_S)
    mean = np.log([0.5])
    for tau in (0.1, 1.0) * np.array(NOISE):
        (log,), (deviation,) = on_machine((SHARES[0],), [slow], mean, np.array([tau]), mean)
        way = tau**2 / (tau**2 + NOISE**2)
        assert log - mean[0] == pytest.approx(way * math.log(0.4 / 0.5), rel=1e-3)
        assert deviation == pytest.approx(tau * math.sqrt(1 - way), rel=1e-3)


def test_rows_of_one_curve_tell_no_more_than_a_few() -> None:
    """Their errors go together: a hundred alike weigh as four of them."""
    one = row(there("one"), kernel(efficiency=curve(efficiency=(0.4,))), 1, BYTES_PER_S)
    mean, tau = np.log([0.5]), np.array([NOISE])
    (few,), (many,) = (on_machine((SHARES[0],), [one] * n, mean, tau, mean)[0] for n in (shares.ALIKE, 100))
    assert few == pytest.approx(many, rel=1e-6)


def test_a_share_between_two_places_answers_to_both_as_it_is_interpolated() -> None:
    logs, step = np.log([0.8, 0.4, 1e-4]), 1e-5
    for tokens in (0.5, 1, 8, 64, 500):
        one = row(there("one"), kernel(efficiency=curve()), tokens, BYTES_PER_S)
        (as_it_is,) = told([one], TOY, logs)
        for at in range(2):
            moved = logs + step * (np.arange(3) == at) * 100
            (other,) = told([one], TOY, moved)
            assert (other.error - as_it_is.error) / (100 * step) == pytest.approx(as_it_is.slopes[at], abs=0.06)
        assert as_it_is.slopes[:2].sum() == pytest.approx(-1, abs=1e-3)


def test_a_latency_and_a_share_of_many_tokens_are_less_alike_than_a_share_of_few() -> None:
    few, many, latency = TOY
    attention = Parameter(("attend_decode/toy/bf16",), 1.0, 0.5)
    assert [each.tau for each in (few, many, latency, attention)] == [FEW_TAU, MANY_TAU, LATENCY_TAU, MANY_TAU]


def test_a_spread_is_what_left_out_curves_were_off_by_with_machines_counting_alike() -> None:
    """Errors of 0.3 in one row and of 0.1 in three of another machine: the root of 0.05."""
    one, two = rows_of("one")[:1], rows_of("two")[:3]
    errors = dict.fromkeys([each.id for each in two], -0.1) | {one[0].id: 0.3}
    assert spreads_of([*one, *two], errors) == {"decode": round(math.sqrt(0.05), 3), "prefill": MANY_TAU}
    assert spreads_of(one, {one[0].id: 0.0})["decode"] == LEAST_SPREAD


def test_a_machine_of_one_curve_is_no_evidence_of_how_far_its_rates_are_off() -> None:
    rows = [*rows_of("one"), *rows_of("two", "a")]
    errors = left_out(TOY, rows, fit(TOY, rows))
    assert errors.keys() == {each.id for each in rows_of("one")}


def test_a_kernel_is_a_machines_own_where_its_rows_tell_of_it() -> None:
    other = Parameter(("linear/toy/fp8",), 1.0, 0.5)
    parameters = (*TOY, other)
    fitted = fit(parameters, ROWS)
    found = known_kernels(parameters, ROWS, fitted, {"decode": 0.1, "prefill": 0.2})
    assert found.keys() == TRUE.keys()
    for name, kernels in found.items():
        (own,) = kernels.values()
        assert [*kernels] == [KEY]
        assert own.efficiency is not None
        assert own.latency is not None
        assert (own.efficiency.at, own.efficiency.over) == ((1, 64), "tokens")
        assert own.efficiency.spread == own.latency.spread == 0.1
        assert own.efficiency.fitted_on == (f"toy.json {name}",)
    assert all(deviation[3] >= KNOWN * fitted.tau[3] for deviation in fitted.deviations.values())


@pytest.fixture
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "KERNELS", tmp_path)
    monkeypatch.setattr(shares, "ENGINES", {"toy": TOY})
    monkeypatch.setattr(shares, "rows_of", lambda _engine: ROWS)


@pytest.mark.usefixtures("_toy")
def test_what_a_machine_measured_itself_stays_and_what_rows_set_is_set_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"latency": {"value": 1.0, "unit": "s", "spread": 0.1, "n": 1, "source": "measured", "date": DATE}}
    own = {KEY: measured, "append/toy/bf16": measured}
    before = {"schema": "twin.kernels/1", "engine": "toy", "machines": {"one": own}}
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(before), encoding="utf-8")
    assert main(["--check", "toy"]) == 1
    assert json.loads(path.read_bytes()) == before
    assert main(["toy"]) == 0
    after = json.loads(path.read_bytes())["machines"]
    assert after["one"] == own
    assert list(after) == sorted(TRUE)
    assert after["two"][KEY]["efficiency"]["source"] == "fitted"
    written = path.read_bytes()
    assert main(["--check", "toy"]) == 0
    assert main(["toy"]) == 0
    assert path.read_bytes() == written
    assert "36 rows, 3 machines" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["triton", "exllamav3"])
def test_shipped_rates_are_those_that_rows_give(engine: str) -> None:
    """Up to the last digit that is kept: a library of linear algebra may round otherwise."""
    shipped = json.loads((KERNELS / f"{engine}.json").read_bytes())
    document, _ = document_of(engine)
    found, kept = (dict(flat(each)) for each in (json.loads(json.dumps(document)), shipped))
    assert found.keys() == kept.keys()
    assert DATE in kept.values()
    for path, value in kept.items():
        assert found[path] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-2)), path


def flat(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Every number and word with its path."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(each, f"{path}.{name}")


def test_what_kernels_leave_of_a_served_step_is_what_a_host_would_have_to_take() -> None:
    """A host that takes as much makes the step as long as it was."""
    one = next(own for own in speed_rows() if own.served and own.engine == "vllm")
    left_s = beside_kernels_s(one)
    assert one in served("vllm")[one.machine.device_name, one.case.model.name]
    longer = one._replace(seconds=one.seconds + 0.5)
    assert beside_kernels_s(longer) == pytest.approx(left_s + 0.5)
    host = {"step/vllm/decode": kernel(latency_s=beside_kernels_s(longer))}
    whole = replace(one.machine, kernels=one.machine.kernels | host)
    assert one.breakdown(Roofs(whole, strict=False)).seconds == pytest.approx(longer.seconds, rel=1e-6)

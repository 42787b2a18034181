"""Shipped profiles hold what the fit of published rows gives; every row that sets a rate is named."""

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from calibrate.published import fit as fits
from calibrate.published.cases import Recorded, load_recorded
from calibrate.published.fit import (
    BLOG,
    PARAMETERS,
    VLLM,
    Parameter,
    Rows,
    fit,
    fit_workspace,
    main,
    shipped,
    solve,
    with_parameters,
)
from calibrate.published.leave_one_out import leave_one_out, text
from calibrate.published.recorded import estimate_of, role_reasons, validate_recorded
from hwprofiles import load_profile
from hwprofiles.rates import Curve, Rate
from twin.engines import load_engine

FITTED_WITHIN = 1e-3
LAST_BIT = 1e-12

machines = pytest.mark.parametrize("machine", PARAMETERS)


def found(machine: str, recorded: Recorded | None = None) -> dict[str, float]:
    """What a fit comes to. It begins at a share of what is shipped and has to find its way back."""
    profile = load_profile(machine)
    elsewhere = with_parameters(profile, shipped(profile) + np.log({BLOG: 0.9, VLLM: 1.03}[machine]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fits, "load_profile", lambda _name: elsewhere)
        return fit(machine, recorded)


fitted = cache(found)


def points(machine: str) -> dict[str, float]:
    """Values of the parameters as they are shipped."""
    return dict(zip(map(str, PARAMETERS[machine]), np.exp(shipped(load_profile(machine))), strict=True))


def rate_of(machine: str, parameter: Parameter) -> Rate | Curve:
    kernel = load_profile(machine).kernels[parameter.kernel]
    rate = kernel.latency if parameter.at is None else kernel.efficiency
    assert rate is not None
    return rate


def test_the_shipped_workspace_is_the_fitted_one() -> None:
    workspace = load_engine("exllamav3").workspace
    assert workspace.value == pytest.approx(fit_workspace(), rel=1e-4)
    assert workspace.fitted_on == ("blog.vram_model",)


@machines
def test_a_parameter_is_one_point_and_no_row_sets_two(machine: str) -> None:
    own = PARAMETERS[machine]
    rows = [row for parameter in own for row in parameter.rows]
    assert len({(parameter.kernel, parameter.at) for parameter in own}) == len(own)
    assert len(set(rows)) == len(rows) >= len(own)


@machines
def test_every_fitted_rate_and_no_other_names_the_rows_that_set_it_and_these_are_no_evidence(machine: str) -> None:
    profile, own = load_profile(machine), PARAMETERS[machine]
    reasons = role_reasons(load_recorded(machine), profile)
    for parameter in own:
        rate, kind = rate_of(machine, parameter), "latency" if parameter.at is None else "efficiency"
        same = [p for p in own if (p.kernel, p.at is None) == (parameter.kernel, parameter.at is None)]
        assert rate.source == "fitted", parameter
        assert sorted(rate.fitted_on) == sorted(row for each in same for row in each.rows)
        kernels = (parameter.kernel, *parameter.shared)
        places = [f"sets profile.kernels.{kernel}.{kind}" for kernel in kernels]
        assert all(reasons[row] in places for row in parameter.rows)
    prefix = {BLOG: "blog.", VLLM: "vllm."}[machine]
    rates = [(key, rate) for key, kernel in profile.kernels.items() for rate in (kernel.efficiency, kernel.latency)]
    named = {key for key, rate in rates if rate is not None and any(row.startswith(prefix) for row in rate.fitted_on)}
    assert named == {key for parameter in own for key in (parameter.kernel, *parameter.shared)}


def test_what_is_fitted_is_a_kernel_of_vllm() -> None:
    rules = load_engine("vllm")
    backends = {*rules.backends.by_format.values(), *rules.backends.verify_only.values()}
    known = {name for names in backends for name in names} | set(rules.implementations.values())
    for parameter in PARAMETERS[VLLM]:
        _, implementation, variant = parameter.kernel.split("/")
        assert implementation in known
        assert variant in rules.formats + rules.weight_formats


@machines
def test_a_point_gives_its_row_back_or_lies_between_two_as_the_report_tells(machine: str) -> None:
    """Within a per cent: rows share the weights' rate, which two rows of one load pull either way."""
    profile, recorded = load_profile(machine), load_recorded(machine)
    told = {case.id: case.predicted for case in validate_recorded(machine).cases}
    for parameter in PARAMETERS[machine]:
        cases = [recorded.case_of[row] for row in parameter.rows]
        assert [estimate_of(case, profile, intervals=False).value for case in cases] == [
            told[case.id] for case in cases
        ]
        errors = Rows(recorded, profile, cases).errors(shipped(profile))
        if len(errors) == 1:
            assert abs(errors[0]) < (0.01 if machine == VLLM else 1e-3), parameter
        else:
            assert errors.min() < 0 < errors.max(), parameter


@machines
def test_parameters_go_to_their_points_and_nowhere_else(machine: str) -> None:
    profile, own = load_profile(machine), PARAMETERS[machine]
    values = np.log(np.linspace(0.1, 0.9, len(own)))
    changed = with_parameters(profile, values)
    assert shipped(changed) == pytest.approx(values)
    if machine == VLLM:  # efficiencies alone
        assert np.exp(shipped(with_parameters(profile, np.full(len(own), 0.5)))).max() == 1.0
    at = {(key, parameter.at) for parameter in own for key in (parameter.kernel, *parameter.shared)}
    assert changed.kernels.keys() == profile.kernels.keys()
    for key, kernel in changed.kernels.items():
        before, after = profile.kernels[key], kernel
        if (key, None) not in at:
            assert after.latency == before.latency
        if before.efficiency is None or after.efficiency is None:
            assert before.efficiency is after.efficiency
            continue
        pairs = zip(after.efficiency.at, before.efficiency.efficiency, after.efficiency.efficiency, strict=True)
        assert all(old == new or (key, point) in at for point, old, new in pairs)
        assert after.efficiency.fitted_on == before.efficiency.fitted_on


def test_a_profile_without_a_point_is_refused() -> None:
    profile, kernel = load_profile(VLLM), PARAMETERS[VLLM][0].kernel
    curve = profile.kernels[kernel].efficiency
    assert curve is not None
    other = replace(profile.kernels[kernel], efficiency=replace(curve, at=tuple(at + 0.5 for at in curve.at)))
    bare = replace(profile, kernels=profile.kernels | {kernel: other})
    for refused in (lambda: shipped(bare), lambda: with_parameters(bare, shipped(profile))):
        with pytest.raises(ValueError, match="no efficiency at 64 to fit"):
            refused()


def test_a_fit_on_paper_finds_its_target_and_stops_at_one() -> None:
    found, jacobian = solve(lambda at: at - np.array([-1.0, -2.0]), np.array([-0.5, -0.5]))
    assert found == pytest.approx([-1.0, -2.0])
    assert jacobian == pytest.approx(np.eye(2))
    capped, _ = solve(lambda at: at - np.array([1.0]), np.array([-0.5]))
    assert capped == pytest.approx([0.0])


def disturbed(recorded: Recorded, change: Callable[[], float]) -> Recorded:
    """The same with every number of rows that set a rate changed by a share."""
    setting = {row for parameter in PARAMETERS[recorded.machine] for row in parameter.rows}
    rows = (replace(row, value=row.middle * (1 + change())) if row.id in setting else row for row in recorded.rows)
    return replace(recorded, rows=tuple(rows))


@machines
def test_shipped_rates_are_what_the_fit_comes_to_from_elsewhere(machine: str) -> None:
    assert fitted(machine) == pytest.approx(points(machine), rel=FITTED_WITHIN)


@pytest.mark.parametrize(("machine", "seed"), [(VLLM, 0), *((BLOG, seed) for seed in range(6))])
def test_rates_do_not_hang_on_last_bits(machine: str, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    other = disturbed(load_recorded(machine), lambda: LAST_BIT * chance.uniform(-1, 1))
    assert found(machine, other) == pytest.approx(fitted(machine), rel=1e-6)


@machines
def test_the_command_names_each_parameter_and_its_rows(
    machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fits, "fit", points)
    main([machine])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PARAMETERS[machine]) + (machine == BLOG)
    for line, parameter in zip(lines, PARAMETERS[machine], strict=False):
        assert line.startswith(str(parameter))
        assert line.endswith(f"from {', '.join(parameter.rows)}")


def test_a_row_left_out_is_predicted_from_the_others_or_listed_with_what_it_alone_sets() -> None:
    rows = {row.id: row for row in leave_one_out(BLOG)}
    assert rows["blog.decode_fixed"].error is None
    assert rows["blog.decode_fixed"].reason == "alone sets gather_host/exllamav3/fp16 latency"
    errors = [abs(row.error) for row in rows.values() if row.error is not None]
    assert len(errors) == 6
    assert max(errors) == pytest.approx(0.067, abs=0.001)
    told = text(BLOG, list(rows.values()))
    assert "  6 rows: median 0.6 %, worst 6.7 %; 1 listed\n" in told
    assert "blog.decode_1M                                            47.91 against       50.7    -5.5 %" in told

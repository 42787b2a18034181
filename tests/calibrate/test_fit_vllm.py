"""The shipped RTX 3090 holds what the fit of vLLM's published rows gives; every row that sets a rate is named."""

import numpy as np
import pytest
from msgspec.structs import replace

from calibrate import fit_vllm
from calibrate.cases import Recorded, load_recorded
from calibrate.fit_vllm import MACHINE, PARAMETERS, Rows, fit, predicted, shipped, solve, with_parameters
from calibrate.recorded import role_reasons, validate_recorded
from hwprofiles import HardwareProfile, load_profile
from twin.engines import load_engine

FITTED_WITHIN = 1e-3


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    return load_profile(MACHINE)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return load_recorded(MACHINE)


def rows_of(kernel: str) -> list[str]:
    """Rows that set the points of a kernel's efficiency."""
    return [row for parameter in PARAMETERS if parameter.kernel == kernel for row in parameter.rows]


def test_shipped_points_are_what_the_fit_comes_to_from_elsewhere(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins at what is shipped: here at 0.9 of that, so that it has to find its way back."""
    elsewhere = with_parameters(profile, shipped(profile) + np.log(0.9))
    monkeypatch.setattr(fit_vllm, "load_profile", lambda _name: elsewhere)
    points = dict(zip(map(str, PARAMETERS), np.exp(shipped(profile)), strict=True))
    assert fit() == pytest.approx(points, rel=FITTED_WITHIN)


def test_a_parameter_is_one_point_of_a_curve_and_no_row_sets_two() -> None:
    points = [(parameter.kernel, parameter.at) for parameter in PARAMETERS]
    rows = [row for parameter in PARAMETERS for row in parameter.rows]
    assert len(set(points)) == len(points)
    assert len(set(rows)) == len(rows) >= len(points)


def test_every_row_that_sets_a_rate_is_no_evidence(recorded: Recorded, profile: HardwareProfile) -> None:
    reasons = role_reasons(recorded, profile)
    for parameter in PARAMETERS:
        for row in parameter.rows:
            assert reasons[row] == f"sets profile.kernels.{parameter.kernel}.efficiency"


def test_every_fitted_rate_names_the_rows_that_set_it(profile: HardwareProfile) -> None:
    for kernel in {parameter.kernel for parameter in PARAMETERS}:
        curve = profile.kernels[kernel].efficiency
        assert curve is not None
        assert curve.source == "fitted", kernel
        assert sorted(curve.fitted_on) == sorted(rows_of(kernel)), kernel


def test_no_other_kernel_is_fitted_on_rows_of_vllm(profile: HardwareProfile) -> None:
    named = {
        key
        for key, kernel in profile.kernels.items()
        for rate in (kernel.efficiency, kernel.latency)
        if rate is not None and any(row.startswith("vllm.") for row in rate.fitted_on)
    }
    assert named == {parameter.kernel for parameter in PARAMETERS}


def test_what_is_fitted_is_a_kernel_of_vllm() -> None:
    rules = load_engine("vllm")
    backends = {
        name for names in (*rules.backends.by_format.values(), *rules.backends.verify_only.values()) for name in names
    }
    for parameter in PARAMETERS:
        _, implementation, variant = parameter.kernel.split("/")
        assert implementation in backends | set(rules.implementations.values())
        assert variant in rules.formats + rules.weight_formats


def test_a_point_gives_its_row_back_or_lies_between_two(recorded: Recorded, profile: HardwareProfile) -> None:
    """Within a per cent: rows share the weights' rate, which two rows of one load pull either way."""
    rows = Rows(recorded, profile)
    for parameter in PARAMETERS:
        errors = rows.logarithms(parameter.rows, shipped(profile))
        if len(parameter.rows) == 1:
            assert abs(errors[0]) < 0.01, str(parameter)
        else:
            assert errors.min() < 0 < errors.max(), str(parameter)


def test_the_fit_sees_what_the_report_tells(recorded: Recorded, profile: HardwareProfile) -> None:
    told = {case.id: case.predicted for case in validate_recorded(MACHINE).cases}
    for parameter in PARAMETERS:
        for row in parameter.rows:
            assert predicted(recorded.case_of[row], profile) == told[row]


def test_parameters_go_to_their_points_and_nowhere_else(profile: HardwareProfile) -> None:
    values = np.log(np.linspace(0.1, 0.9, len(PARAMETERS)))
    changed = with_parameters(profile, values)
    assert shipped(changed) == pytest.approx(values)
    points = {(parameter.kernel, parameter.at) for parameter in PARAMETERS}
    assert changed.kernels.keys() == profile.kernels.keys()
    for key, kernel in changed.kernels.items():
        before, after = profile.kernels[key].efficiency, kernel.efficiency
        if before is None or after is None:
            assert kernel == profile.kernels[key]
            continue
        assert (after.at, after.fitted_on) == (before.at, before.fitted_on)
        for at, old, new in zip(after.at, before.efficiency, after.efficiency, strict=True):
            assert old == new or (key, at) in points


def test_an_efficiency_stays_at_most_one(profile: HardwareProfile) -> None:
    assert np.exp(shipped(with_parameters(profile, np.full(len(PARAMETERS), 0.5)))).max() == 1.0


def test_a_profile_without_a_point_is_refused(profile: HardwareProfile) -> None:
    kernel = PARAMETERS[0].kernel
    curve = profile.kernels[kernel].efficiency
    assert curve is not None
    other = replace(profile.kernels[kernel], efficiency=replace(curve, at=tuple(at + 0.5 for at in curve.at)))
    with pytest.raises(ValueError, match="no efficiency at 64 to fit"):
        shipped(replace(profile, kernels=profile.kernels | {kernel: other}))


def test_a_fit_on_paper_finds_its_target_and_stops_at_one() -> None:
    found, jacobian = solve(lambda at: at - np.array([-1.0, -2.0]), np.array([-0.5, -0.5]))
    assert found == pytest.approx([-1.0, -2.0])
    assert jacobian == pytest.approx(np.eye(2))
    capped, _ = solve(lambda at: at - np.array([1.0]), np.array([-0.5]))
    assert capped == pytest.approx([0.0])


def test_the_command_names_each_parameter_and_its_rows(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = dict(zip(map(str, PARAMETERS), np.exp(shipped(profile)), strict=True))
    monkeypatch.setattr(fit_vllm, "fit", lambda: values)
    fit_vllm.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PARAMETERS)
    for line, parameter in zip(lines, PARAMETERS, strict=True):
        assert line.startswith(str(parameter))
        assert line.endswith(f"from {', '.join(parameter.rows)}")

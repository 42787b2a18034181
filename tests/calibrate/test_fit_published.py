"""The shipped machine and rulebook hold what the fit of the published rows gives."""

import pytest

from calibrate.fit_published import GATHER, LINEAR, MACHINE, SPARSE, TARGETS, fit, fit_workspace
from hwprofiles import load_profile
from hwprofiles.rates import Curve, Rate
from twin.engines import load_engine
from twin.roofline import Roofs

FORMS = load_profile(MACHINE).kernels


def shipped() -> dict[str, float]:
    """The fitted parameters in the profile, in the order of the targets that set them."""
    linear, sparse, gather = FORMS[LINEAR].efficiency, FORMS[SPARSE].efficiency, FORMS[GATHER].latency
    assert linear is not None
    assert sparse is not None
    assert gather is not None
    values = (linear.efficiency[0], gather.value, linear.efficiency[1], sparse.efficiency[0])
    return dict(zip([target.parameter for target in TARGETS], values, strict=True))


def test_shipped_rates_are_the_fitted_ones() -> None:
    assert shipped() == pytest.approx(fit(), rel=1e-4)


def test_the_shipped_workspace_is_the_fitted_one() -> None:
    assert load_engine("exllamav3").workspace.value == pytest.approx(fit_workspace(), rel=1e-4)


@pytest.mark.parametrize("target", TARGETS, ids=[target.row for target in TARGETS])
def test_shipped_rates_reproduce_the_rows_that_set_them(target: object) -> None:
    assert isinstance(target, type(TARGETS[0]))
    predicted = target.predict(Roofs(load_profile(MACHINE)))
    assert predicted == pytest.approx(target.published, rel=1e-3)


def test_every_fitted_rate_names_the_rows_that_set_it() -> None:
    rates: list[Rate | Curve | None] = [FORMS[LINEAR].efficiency, FORMS[SPARSE].efficiency, FORMS[GATHER].latency]
    named = [row for rate in rates if rate is not None for row in rate.fitted_on]
    assert sorted(named) == sorted(target.row for target in TARGETS)
    assert all(rate is not None and rate.source == "fitted" for rate in rates)
    assert load_engine("exllamav3").workspace.fitted_on == ("blog.vram_model",)

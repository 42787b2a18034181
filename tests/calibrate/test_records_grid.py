"""Cases of gathers over records: none where calibration is, every format and open tail met, what has no rate told."""

import pytest

from calibrate.kernel_cases import missing_rate
from calibrate.records_grid import CONTEXTS, CPU_CONTEXTS, records_grid
from hwprofiles import load_profile
from twin.engines.twin import INTERLEAVED


def test_no_context_is_one_of_calibration_and_tails_differ() -> None:
    for contexts in (CONTEXTS, CPU_CONTEXTS):
        assert all(ctx & (ctx - 1) for ctx in contexts)
        assert len({ctx % 4 for ctx in contexts}) >= 3


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_quick_grid_is_a_part_of_the_whole_and_ids_are_unique(device: str) -> None:
    quick, whole = (records_grid(quick=quick, device=device) for quick in (True, False))
    assert set(quick) < set(whole)
    assert len({case.id for case in whole}) == len(whole)
    assert {case.format for case in quick} == set(INTERLEAVED)


def test_a_profile_without_the_rate_is_told_it() -> None:
    case = records_grid(quick=True, device="cuda")[0]
    assert missing_rate(case, load_profile("3x-rtx3090")) == (
        f"profile 3x-rtx3090 has no rate for gather_host/twin/{case.format}"
    )

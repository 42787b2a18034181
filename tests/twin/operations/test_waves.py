"""Waves of programs counted by hand, and the rule by which few programs are divided over keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.operations.waves import GOOD_ENOUGH, MAX_SPLITS, RESIDENT, Grid, flash_splits


@pytest.mark.parametrize(
    ("programs", "full", "alone"),
    [(7, 1, 0), (8, 1, 0), (9, 1, 1), (12, 1, 1), (13, 2, 0), (16, 2, 0), (17, 2, 1), (8_000, 1_000, 0)],
)
def test_a_last_wave_is_alone_where_each_of_its_programs_has_a_multiprocessor(
    programs: int, full: int, alone: int
) -> None:
    """4 multiprocessors of 2 places, one tile: nothing to divide."""
    waves = Grid(programs=programs, tiles=1, partial_bytes=100).on(4)
    assert waves == (1, full, alone, programs, 0)


@pytest.mark.parametrize(
    ("programs", "tiles", "splits"),
    [(24, 128, 10), (72, 128, 7), (192, 128, 4), (192, 8, 4), (211, 128, 5), (212, 128, 1), (288, 128, 1), (24, 3, 3)],
)
def test_few_programs_are_divided_until_they_fill_264_places(programs: int, tiles: int, splits: int) -> None:
    """24 programs in 10 parts are 240, 91 %; in 11 they would be 264, but 10 are within 85 % of that."""
    assert flash_splits(programs=programs, tiles=tiles, places=264) == splits


def test_a_split_that_shortens_no_run_of_tiles_is_passed_over() -> None:
    """5 tiles in 3 or in 4 parts leave runs of 2: the fourth of 4 places would stay idle anyway."""
    assert flash_splits(programs=1, tiles=5, places=4) == 3


def test_partial_results_are_written_and_read_only_where_there_are_several() -> None:
    assert Grid(programs=24, tiles=128, partial_bytes=100).on(132).merged_bytes == 2 * 10 * 100
    assert Grid(programs=264, tiles=128, partial_bytes=100).on(132).merged_bytes == 0


@given(st.integers(1, 2_000), st.integers(1, 500), st.integers(1, 200))
def test_no_division_makes_waves_worse_and_all_programs_have_a_place(
    programs: int, tiles: int, multiprocessors: int
) -> None:
    waves = Grid(programs=programs, tiles=tiles).on(multiprocessors)
    places = RESIDENT * multiprocessors
    assert waves.programs == programs * waves.splits
    assert waves.splits <= min(tiles, MAX_SPLITS)
    assert waves.programs <= waves.full * places + waves.alone * multiprocessors
    undivided = programs / (-(-programs // places) * places)
    divided = waves.programs / (-(-waves.programs // places) * places)
    assert divided >= GOOD_ENOUGH * undivided

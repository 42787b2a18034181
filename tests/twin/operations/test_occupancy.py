"""How attention is cut into programs: rows, splits and rounds worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.operations.occupancy import BEGUN_TILES, Cut, Plan, Program, even_splits, tile_tokens

ONE, TWO, THREE = (Program(64, 16, sets, 2) for sets in (1, 2, 3))
PLAN = Plan(programs=(ONE, TWO, THREE))
ALONE = Plan(alone=Program(64, 8, 1, 4), programs=(TWO, THREE))


@pytest.mark.parametrize(
    ("rows", "blocks", "program"),
    [(1, 1, ONE), (16, 1, ONE), (17, 1, TWO), (48, 1, THREE), (49, 2, TWO), (192, 4, THREE)],
)
def test_equal_programs_share_the_rows(rows: int, blocks: int, program: Program) -> None:
    assert PLAN.programs_of(rows) == (blocks, program)


def test_a_program_that_stands_alone_is_taken_only_where_it_holds_all_rows() -> None:
    assert ALONE.programs_of(8) == (1, ALONE.alone)
    assert ALONE.programs_of(9) == (1, TWO)
    assert ALONE.programs_of(97) == (3, THREE)


def test_tiles_have_the_same_bytes_whatever_the_head() -> None:
    assert [tile_tokens(ONE, head_dim=dim) for dim in (64, 128, 256, 512, 4096)] == [128, 128, 64, 32, 16]


def cut(**changes: int) -> Cut:
    sizes = {"pairs": 4, "tiles": 64, "tile_elements": 100, "rows": 16, "per_multiprocessor": 2, "partial_bytes": 10}
    return Cut(**{**sizes, **changes})


def test_a_device_that_the_pairs_divide_is_filled_once() -> None:
    """8 places, 4 pairs: 2 splits of 32 tiles, one round."""
    share = cut().on(4)
    assert share.splits == 2
    assert share.elements == 8 * (32 + BEGUN_TILES) * 100
    assert share.merged_bytes == 2 * 2 * 10


def test_short_splits_fill_a_last_round_better() -> None:
    """5 pairs on 8 places: one split each leaves 3 idle; 3 of 22 tiles fill two rounds but for one place."""
    share = cut(pairs=5).on(4)
    assert share.splits == 3
    assert share.elements == 2 * 8 * (22 + BEGUN_TILES) * 100


def test_a_split_that_reads_no_tiles_takes_a_place_and_leaves_a_result() -> None:
    """12 places, 4 pairs: 5 splits of 13 tiles and one beside, in two rounds, end before 2 of 32 in one do."""
    share = cut(other_splits=1).on(6)
    assert (share.splits, share.merged_bytes) == (6, 2 * 6 * 10)
    assert share.elements == 2 * 12 * (13 + BEGUN_TILES) * 100


@LAWS
@given(st.integers(1, 500), st.integers(1, 3000), st.integers(1, 264))
def test_programs_do_at_least_the_work_that_there_is(pairs: int, tiles: int, multiprocessors: int) -> None:
    share = cut(pairs=pairs, tiles=tiles).on(multiprocessors)
    assert share.elements >= pairs * tiles * 100
    assert 1 <= share.splits <= min(tiles, 256)


def test_the_number_of_multiprocessors_changes_the_cut() -> None:
    assert even_splits(pairs=4, tiles=2048, slots=264) != even_splits(pairs=4, tiles=2048, slots=164)

"""How thread blocks fill a device: query rows, splits, rounds and waves worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.operations import occupancy
from twin.operations.occupancy import DecodePlan, FlashGrid, SplitKV, ThreadBlock

ONE, TWO, THREE = (ThreadBlock(64, 16, sets, 2) for sets in (1, 2, 3))
PLAN = DecodePlan(thread_blocks=(ONE, TWO, THREE))
SMALL = ThreadBlock(64, 8, 1, 4)
ALONE = DecodePlan(alone=SMALL, thread_blocks=(TWO, THREE))


@pytest.mark.parametrize(
    ("plan", "q_rows", "found"),
    [(PLAN, 1, (1, ONE)), (PLAN, 16, (1, ONE)), (PLAN, 17, (1, TWO)), (PLAN, 48, (1, THREE)), (PLAN, 49, (2, TWO)),
     (PLAN, 192, (4, THREE)), (ALONE, 8, (1, SMALL)), (ALONE, 9, (1, TWO)), (ALONE, 97, (3, THREE))],
)  # fmt: skip
def test_equal_thread_blocks_share_the_query_rows_unless_one_that_stands_alone_holds_them_all(
    plan: DecodePlan, q_rows: int, found: tuple[int, ThreadBlock]
) -> None:
    assert plan.thread_blocks_of(q_rows) == found


def split_kv(**changes: int) -> SplitKV:
    sizes = {"pairs": 4, "tiles": 64, "tile_elements": 100, "q_rows": 16, "per_multiprocessor": 2, "partial_bytes": 10}
    return SplitKV(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "multiprocessors", "splits", "elements"),
    [
        ({}, 4, 2, 8 * (32 + occupancy.BEGUN_TILES)),  # 8 places for 4 pairs: 2 splits of 32 tiles in one round
        (
            {"pairs": 5},
            4,
            3,
            2 * 8 * (22 + occupancy.BEGUN_TILES),
        ),  # 3 splits of 22 tiles fill two rounds but for one place
        (
            {"other_splits": 1},
            6,
            6,
            2 * 12 * (13 + occupancy.BEGUN_TILES),
        ),  # 5 of 13 and one beside end before 2 of 32 in one
    ],
)
def test_splits_end_as_soon_as_whole_rounds_of_them_can(
    changes: dict[str, int], multiprocessors: int, splits: int, elements: int
) -> None:
    """Each of them begins anew, and leaves a partial result that is written and read."""
    assert split_kv(**changes).on(multiprocessors) == (splits, elements * 100, 2 * splits * 10)


@LAWS
@given(st.integers(1, 500), st.integers(1, 3000), st.integers(1, 264))
def test_thread_blocks_do_at_least_the_work_that_there_is(pairs: int, tiles: int, multiprocessors: int) -> None:
    found = split_kv(pairs=pairs, tiles=tiles).on(multiprocessors)
    assert found.elements >= pairs * tiles * 100
    assert 1 <= found.splits <= min(tiles, 256)


@pytest.mark.parametrize(
    ("thread_blocks", "full", "alone"),
    [(7, 1, 0), (8, 1, 0), (9, 1, 1), (12, 1, 1), (13, 2, 0), (16, 2, 0), (17, 2, 1), (8_000, 1_000, 0)],
)
def test_a_last_wave_is_alone_where_each_of_its_thread_blocks_has_a_multiprocessor(
    thread_blocks: int, full: int, alone: int
) -> None:
    """4 multiprocessors of 2 places, one tile: nothing to split, no partial results."""
    assert FlashGrid(thread_blocks, 1, partial_bytes=100).on(4) == (1, full, alone, thread_blocks, 0)


@pytest.mark.parametrize(
    ("thread_blocks", "tiles", "splits"),
    [(24, 128, 10), (72, 128, 7), (192, 128, 4), (192, 8, 4), (211, 128, 5), (212, 128, 1), (24, 3, 3)],
)
def test_few_thread_blocks_are_split_until_they_fill_264_places(thread_blocks: int, tiles: int, splits: int) -> None:
    """24 in 10 parts are 240, 91 %; in 11 they would be 264, but 10 are within 85 % of that."""
    assert occupancy.flash_splits(thread_blocks=thread_blocks, tiles=tiles, places=264) == splits
    written = 2 * splits * 100 if splits > 1 else 0
    assert FlashGrid(thread_blocks, tiles, partial_bytes=100).on(132).combined_bytes == written
    assert occupancy.flash_splits(thread_blocks=1, tiles=5, places=4) == 3  # a fourth part of 5 tiles shortens no run
    few, many = (occupancy.even_splits(pairs=4, tiles=2048, slots=slots) for slots in (164, 264))
    assert few != many
    assert [ONE.tile_tokens(dim) for dim in (64, 128, 256, 512, 4096)] == [128, 128, 64, 32, 16]


@pytest.mark.parametrize(
    ("q_tokens", "head_dim", "grid"),
    [
        (1, 256, (24, 128, 24 * 257 * 4)),
        (64, 256, (24, 128, 64 * 24 * 257 * 4)),
        (65, 256, (48, 128, 65 * 24 * 257 * 4)),
        (129, 128, (48, 64, 129 * 24 * 129 * 4)),
    ],
)
def test_a_thread_block_takes_64_rows_of_a_wide_head_and_128_of_others(
    q_tokens: int, head_dim: int, grid: tuple[int, int, int]
) -> None:
    assert occupancy.flash_grid(query_heads=24, head_dim=head_dim, q_tokens=q_tokens, kv_tokens=8_192) == grid


@LAWS
@given(st.integers(1, 2_000), st.integers(1, 500), st.integers(1, 200))
def test_no_split_makes_waves_worse_and_all_thread_blocks_have_a_place(
    thread_blocks: int, tiles: int, multiprocessors: int
) -> None:
    waves = FlashGrid(thread_blocks, tiles).on(multiprocessors)
    places = occupancy.RESIDENT * multiprocessors
    assert waves.thread_blocks == thread_blocks * waves.splits
    assert waves.splits <= min(tiles, occupancy.MAX_FLASH_SPLITS)
    assert waves.thread_blocks <= waves.full * places + waves.alone * multiprocessors
    undivided = thread_blocks / (-(-thread_blocks // places) * places)
    divided = waves.thread_blocks / (-(-waves.thread_blocks // places) * places)
    assert divided >= occupancy.GOOD_ENOUGH * undivided

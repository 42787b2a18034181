"""What the sparse kernel issues: a whole padded selection in every bucket, or what falls into the bucket."""

import numpy as np
import pytest
from msgspec.structs import replace

from tests.worlds import case, flash_next, model
from twin.case import Case
from twin.layouts.layout import Pass
from twin.products import (
    dense_block,
    expected_rounded,
    issued_flops,
    issued_tokens,
    merge_partials,
    padded_heads,
    sparse_products,
)


def splitting(of_case: Case) -> Case:
    return replace(of_case, rules=replace(of_case.rules, splits_selection=True))


def test_groups_of_heads_are_padded_to_whole_tiles() -> None:
    """12 query heads a KV head fill a tile of 16; 2 of the toy model too."""
    assert padded_heads(flash_next()) == padded_heads(case()) == 2 * 16
    assert [padded_heads(case(rules={"head_tile": tile})) for tile in (1, 2, 3)] == [4, 4, 6]


@pytest.mark.parametrize("buckets", [1, 2, 64, 5000])
def test_a_masking_engine_issues_its_padded_selection_in_every_bucket(buckets: int) -> None:
    assert issued_tokens(flash_next(), buckets) == 2080
    assert issued_flops(flash_next(), 1024, buckets) == 4 * 1024 * 2080 * 32 * 256


@pytest.mark.parametrize("buckets", [1, 2, 8, 64, 256, 513, 1000, 10_000])
def test_a_splitting_engine_issues_every_selected_token_in_some_bucket(buckets: int) -> None:
    """At least the 513 blocks of 4 over all buckets, at most a tile of 32 tokens more in each."""
    over_all = buckets * issued_tokens(splitting(flash_next()), buckets)
    assert 513 * 4 * (1 - 1e-9) <= over_all <= 513 * 4 + 32 * buckets


def test_a_model_without_selection_issues_nothing_sparse() -> None:
    assert issued_tokens(case(layout="vram", spec=model(every=1, sparse=False)), 1) == 0


@pytest.mark.parametrize(("past", "rows", "pairs"), [(0, 1, 1), (0, 4, 10), (6, 1, 7), (6, 3, 7 + 8 + 9)])
@pytest.mark.parametrize("batch", [1, 2])
def test_dense_attention_multiplies_each_row_with_all_before_it(past: int, rows: int, pairs: int, batch: int) -> None:
    chunk = Pass(past=past, rows=rows, batch=batch)
    (attend,) = dense_block(case(), chunk, 0, times=1, link_bytes=10).ops
    assert attend.flops == 4 * 4 * 8 * pairs * batch
    assert attend.vram_bytes + attend.link_bytes == (past + rows) * 64 * batch
    assert attend.link_bytes == 10


def test_the_sparse_kernel_reads_planes_and_an_index_list_for_each_kv_head() -> None:
    chunk = Pass(past=100, rows=8, batch=2)
    attend = sparse_products(case(), chunk, 0, after=(3,), buckets=1, region_tokens=64, vram_bytes=1000)
    assert attend.vram_bytes == 1000 + 16 * 32 * 4 * 2
    assert attend.flops == issued_flops(case(), 16, 1)
    assert attend.after == (3,)


@pytest.mark.parametrize(("splits", "elements"), [(False, 2 * 32 + 2 * 4), (True, 2 * 4)])
def test_a_fold_passes_partials_and_sums_through_memory(splits: bool, elements: int) -> None:
    """fp32 partials are written and read unless the kernel carries the sum itself, which is read and written."""
    asked = splitting(case()) if splits else case()
    assert merge_partials(asked, Pass(past=100, rows=8), 0, after=(1,)).vram_bytes == 8 * elements * 8 * 4


@pytest.mark.parametrize("mean", [0.01, 0.3, 1.0, 2.0, 7.9, 40.0, 63.9, 64.1, 300.0])
def test_rounding_a_count_up_to_tiles(mean: float) -> None:
    """Against drawn Poisson counts; continuous where the sum gives way to its limit."""
    drawn = np.random.default_rng(1).poisson(mean, 400_000)
    assert expected_rounded(mean, 8) == pytest.approx(float((-(-drawn // 8) * 8).mean()), rel=0.02)

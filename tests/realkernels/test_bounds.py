"""Selections and page tables are refused on the host before a kernel could follow them out of its planes."""

import pytest
import torch

from realkernels.bounds import check_pages, check_rows, check_selected
from realkernels.caches.paged import PAGE_TOKENS, PagedCache
from realkernels.codecs import codec_named
from realkernels.kernels.sparse_prefill import NO_BLOCK
from realkernels.shape import AttentionShape, QsaShape
from realkernels.timed.attend_decode import attentions

SHAPE = AttentionShape(query_heads=2, kv_heads=1, head_dim=32)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def lengths(*each: int) -> torch.Tensor:
    return torch.tensor(each, dtype=torch.int32)


@pytest.mark.parametrize("wrong", [[0, 1, 100], [-1, 2, 3], [4, 4, 5]])
def test_a_decode_selection_out_of_range_or_twice_is_refused(wrong: list[int]) -> None:
    check_selected(table([0, 99, 5]), blocks=100)
    with pytest.raises(IndexError):
        check_selected(table(wrong), blocks=100)


@pytest.mark.parametrize("wrong", [[0, 1, 3], [-1, 0, 2], [1, 1, 2], [1, 0, 2]])
def test_a_row_that_selects_what_it_must_not_see_is_refused(wrong: list[int]) -> None:
    shape = QsaShape(budget=8)
    check_rows(table([0, 2, NO_BLOCK]), past=9, shape=shape)
    with pytest.raises(IndexError):
        check_rows(table(wrong), past=9, shape=shape)


@pytest.mark.parametrize("beyond", [-1, 4, 2**31 - 1])
def test_every_page_in_use_may_be_any_that_exists_and_others_are_not_looked_at(beyond: int) -> None:
    check_pages(table([3, 0], [2, 1]), lengths(32, 17), pages=4, page_tokens=16)
    check_pages(table([3, beyond], [beyond, beyond]), lengths(16, 0), pages=4, page_tokens=16)


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_a_page_that_does_not_exist_is_named(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"page {wrong} of sequence 1 is out of range: there are pages 0 to 3"):
        check_pages(table([3, 9], [2, wrong]), lengths(16, 17), pages=4, page_tokens=16)


@pytest.mark.parametrize("wrong", [-1, 33])
def test_a_length_that_the_table_cannot_hold_is_named(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"sequence 0 has {wrong} tokens: its row of the page table holds 0 to 32"):
        check_pages(table([0, 1]), lengths(wrong), pages=4, page_tokens=16)


@pytest.mark.parametrize("name", ["bf16", "int8_per_token_head", "kvarn_k4v2_g128"])
def test_no_call_is_made_over_a_table_that_leaves_the_planes(name: str) -> None:
    pool = PagedCache.fill(codec_named(name), SHAPE, sequences=1, tokens=PAGE_TOKENS + 1, device=torch.device("cpu"))
    pool.table[0, 1] = 7
    with pytest.raises(IndexError, match="page 7 of sequence 0 is out of range"):
        attentions(pool, [range(1)], q_tokens=1)

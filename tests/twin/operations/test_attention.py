"""What attention issues: dense reads and products by hand, and the sparse kernel's padded or split selection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import dense, pooled
from tests.worlds import LAWS, case, flash_next, model, step, with_rules
from twin.ask.case import Case
from twin.engines.rules import OwnKernelRules
from twin.formats import kv_format
from twin.operations.attention import (
    append,
    combine_partials,
    decode_attention,
    dense_graph,
    expected_rounded,
    issued_flops,
    issued_tokens,
    padded_heads,
    sparse_attention,
)
from twin.operations.occupancy import DecodePlan, ThreadBlock


def splitting(of_case: Case) -> Case:
    return replace(of_case, rules=with_rules(of_case.rules, splits_selection=True))


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
    chunk = step(past, rows, batch=batch)
    (attend,) = dense_graph(case(), chunk, 0, times=1, link_bytes=10).ops
    assert attend.flops == 4 * 4 * 8 * pairs * batch
    assert attend.vram_bytes + attend.link_bytes == (past + rows) * 64 * batch
    assert attend.link_bytes == 10


def test_the_sparse_kernel_reads_planes_and_an_index_list_for_each_kv_head() -> None:
    chunk = step(100, 8, batch=2)
    attend = sparse_attention(case(), chunk, 0, after=(3,), buckets=1, region_tokens=64, vram_bytes=1000)
    assert attend.vram_bytes == 1000 + 16 * 32 * 4 * 2
    assert attend.flops == issued_flops(case(), 16, 1)
    assert attend.after == (3,)


@pytest.mark.parametrize(("splits", "elements"), [(False, 2 * 32 + 2 * 4), (True, 2 * 4)])
def test_a_fold_passes_partials_and_sums_through_memory(splits: bool, elements: int) -> None:
    """fp32 partials are written and read unless the kernel carries the sum itself, which is read and written."""
    asked = splitting(case()) if splits else case()
    assert combine_partials(asked, step(100, 8), 0, after=(1,)).vram_bytes == 8 * elements * 8 * 4


@pytest.mark.parametrize("mean", [0.01, 0.3, 1.0, 2.0, 7.9, 40.0, 63.9, 64.1, 300.0])
def test_rounding_a_count_up_to_tiles(mean: float) -> None:
    """Against drawn Poisson counts; continuous where the sum gives way to its limit."""
    drawn = np.random.default_rng(1).poisson(mean, 400_000)
    assert expected_rounded(mean, 8) == pytest.approx(float((-(-drawn // 8) * 8).mean()), rel=0.02)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_reads_every_cached_token_once_however_many_tokens_ask(rows: int, batch: int) -> None:
    """100 tokens before them and their own: 64 B a token of 2 kv heads x 8 in bf16; 4 x 4 x 8 operations a pair."""
    read = decode_attention(pooled(), step(100, rows, batch=batch), 2, after=(5,))
    assert read.vram_bytes == (100 + rows) * 64 * batch
    assert read.flops == 4 * 4 * 8 * rows * (100 + rows) * batch
    assert (read.grain, read.device, read.after, read.part) == (rows, 2, (5,), "attention")
    assert read.dequantised_elements == 0


@pytest.mark.parametrize(
    ("name", "token_bytes", "decoded"),
    [("bf16", 64, 0), ("fp8", 32, 32), ("int8_per_token_head", 48, 32), ("int4_per_token_head", 32, 32)],
)
def test_a_coded_cache_is_decoded_element_by_element_once(name: str, token_bytes: int, decoded: int) -> None:
    """2 x 2 x 8 elements of K and V a token, whatever they are stored in; plain ones need no decoding."""
    case = pooled(kv_dtype=name)
    read = decode_attention(case, step(99, batch=2), 0, after=())
    assert kv_format(name).plane_bytes(kv_heads=2, head_dim=8) == token_bytes
    assert (read.vram_bytes, read.dequantised_elements) == (200 * token_bytes, 200 * decoded)
    assert read.dtype == "bf16"


@pytest.mark.parametrize(
    ("name", "rows", "kernel"),
    [
        ("bf16", 1, "attend_decode/flash_attention/bf16"),
        ("bf16", 2, "attend_decode/split_kv/bf16"),
        ("fp8", 1, "attend_decode/flashinfer/fp8"),
        ("fp8", 4, "attend_decode/flashinfer/fp8"),
        ("int8_per_token_head", 8, "attend_decode/split_kv/int8_per_token_head"),
    ],
)
def test_several_query_tokens_are_read_for_by_the_backend_that_verifies(name: str, rows: int, kernel: str) -> None:
    assert decode_attention(pooled(kv_dtype=name), step(10, rows), 0, after=()).kernel == kernel


@pytest.mark.parametrize(("name", "stored"), [("bf16", 64), ("fp8", 32), ("int8_per_token_head", 48)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_chunk_is_written_once_in_16_bits_and_once_in_its_format(name: str, stored: int, batch: int) -> None:
    """What the products made is read in 16 bits, 64 B a token, and stored as the format is."""
    case = pooled(kv_dtype=name)
    write = append(case, step(1000, 6, batch=batch), 1)
    assert write.vram_bytes == (64 + stored) * 6 * batch
    assert (write.grain, write.device, write.after, write.flops) == (6 * batch, 1, (), 0)
    assert write.kernel == f"append/{case.backend}/{name}"


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (4, 16), (8, 128)])
def test_what_is_written_grows_with_heads_and_their_size(kv_heads: int, head_dim: int) -> None:
    spec = dense()
    shape = replace(spec.attention, query_heads=8, kv_heads=kv_heads, head_dim=head_dim)
    case = pooled(spec=replace(spec, attention=shape), kv_dtype="fp8")
    elements = 2 * kv_heads * head_dim
    assert append(case, step(0, 3), 0).vram_bytes == 3 * (2 * elements + elements)
    read = decode_attention(case, step(9), 0, after=())
    assert (read.vram_bytes, read.dequantised_elements) == (10 * elements, 10 * elements)
    assert read.flops == 4 * 8 * head_dim * 10


def test_an_engine_with_backends_writes_a_chunk_before_it_attends() -> None:
    chunk = step(6, 3)
    write, attend = dense_graph(pooled(), chunk, 0, times=5, link_bytes=0).ops
    assert (write.part, attend.part, attend.after) == ("append", "attention", (0,))
    assert attend.flops == 4 * 4 * 8 * (7 + 8 + 9)
    assert attend.kernel == "attend_dense/flash_attention/bf16"
    assert dense_graph(pooled(), chunk, 0, times=5, link_bytes=0).times == 5
    assert len(dense_graph(case(), chunk, 0, times=1, link_bytes=0).ops) == 1  # exllamav3's kernels do both in one


@LAWS
@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_a_verify_step_reads_what_one_token_reads_and_its_own(past: int, rows: int, more: int, batch: int) -> None:
    few, many = (
        decode_attention(pooled(), step(past, count, batch=batch), 0, after=()) for count in (rows, rows + more)
    )
    assert many.vram_bytes - few.vram_bytes == more * 64 * batch
    assert many.flops > few.flops


@LAWS
@given(st.integers(0, 10**5), st.integers(1, 500), st.integers(1, 500))
def test_a_prompt_in_two_chunks_pairs_as_many_tokens_as_in_one(past: int, one: int, two: int) -> None:
    chunks = (
        step(past, one + two),
        step(past, one),
        step(past + one, two),
    )
    whole, *parts = (dense_graph(pooled(), chunk, 0, times=1, link_bytes=0).ops for chunk in chunks)
    for op in (0, 1):
        assert whole[op].flops == sum(part[op].flops for part in parts)
    assert whole[0].vram_bytes == sum(part[0].vram_bytes for part in parts)
    assert whole[1].vram_bytes <= sum(part[1].vram_bytes for part in parts)


def test_more_query_rows_than_a_program_holds_take_the_codes_apart_again() -> None:
    plan = DecodePlan(thread_blocks=(ThreadBlock(64, 16, 1, 2), ThreadBlock(64, 32, 1, 2)))
    rules = replace(pooled().rules, own_kernels=OwnKernelRules(decode_plans={"fp8": plan}))
    of_case = replace(pooled(kv_dtype="fp8"), rules=rules)
    attention = of_case.model.attention
    group = attention.query_heads // attention.kv_heads
    elements = 2 * 100 * attention.kv_heads * attention.head_dim
    for count in (1, 2, 4, 8):
        read = decode_attention(of_case, step(100 - count, count, batch=1), 0, after=())
        blocks = -(-count * group // 32)
        tile = 16 if count * group <= 16 * blocks else 32
        assert read.dequantised_elements == elements * blocks
        assert read.flops == 2 * elements * blocks * tile
        assert read.vram_bytes == 100 * of_case.plane_bytes
        assert read.split_kv is not None
        assert (read.split_kv.pairs, read.split_kv.q_rows) == (attention.kv_heads * blocks, tile)
        assert read.split_kv.partial_bytes == count * attention.query_heads * (attention.head_dim + 2) * 4


def test_an_engine_whose_plans_are_not_known_multiplies_the_rows_that_there_are() -> None:
    read = decode_attention(pooled(), step(9), 0, after=())
    attention = pooled().model.attention
    assert read.split_kv is None
    assert read.flops == 4 * 10 * attention.query_heads * attention.head_dim

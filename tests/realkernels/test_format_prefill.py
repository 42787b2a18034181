"""Prefill over quantised caches as it is timed: right for every format; wrong and stale results are noticed."""

import pytest
import torch

from realkernels.codecs.decode import FORMS
from realkernels.expand.expander import expander
from realkernels.format_prefill import FormatPrefill
from realkernels.shape import AttentionShape

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=64)
RIGHT = 1e-5


def prefill(name: str, rows: int, ctx: int, **given: object) -> FormatPrefill:
    sizes = {"piece_tokens": 256, "caches": 1} | given
    return FormatPrefill(name, shape=SHAPE, rows=rows, ctx_tokens=ctx, device=CPU, **sizes)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "ctx"), [(5, 300), (200, 620)])
def test_attention_is_that_over_the_unpacked_cache(name: str, rows: int, ctx: int) -> None:
    timed = prefill(name, rows, ctx, caches=2 if rows == 5 else 1)
    assert timed.verify() < RIGHT
    assert timed.expand_error() == 0


@pytest.mark.parametrize("name", ["bf16", "int4_per_token_head", "kvarn_k4v4_g128"])
def test_the_unpacking_kernel_takes_the_place_of_read(name: str) -> None:
    timed = prefill(name, 30, 300)
    timed._expand = expander(timed.format, timed.pool.planes)
    assert timed.verify() < RIGHT
    assert timed.expand_error() == 0


def test_numbers_that_are_not_those_of_read_are_counted() -> None:
    timed = prefill("q8_0", 3, 300)
    inner = timed._expand

    def other(table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **piece: int) -> None:
        inner(table, keys, values, **piece)
        keys[:30] += 1.0

    timed._expand = other
    assert timed.expand_error() == pytest.approx(60 / 600)
    assert timed.verify() > 0.01


def test_a_stale_output_is_wrong() -> None:
    timed = prefill("bf16", 3, 40)
    assert timed.verify() < RIGHT
    timed.query.normal_()
    assert timed.error() > 0.01
    timed.poison()
    assert timed.error() == float("inf")
    assert not timed.finite()


def test_bytes_and_operations_are_counted_exactly() -> None:
    timed = prefill("q8_0", 3, 300)
    assert timed.cache_bytes == 300 * 2 * 2 * 2 * 34
    assert timed.expanded_bytes == timed.cache_bytes + 300 * 2 * 2 * 64 * 4
    assert timed.flops == 4 * 4 * 64 * (298 + 299 + 300)


def test_unpacking_alone_can_end_early() -> None:
    timed = prefill("bf16", 1, 600)
    timed.poison()
    timed.run_expand(tokens=40)
    assert bool(timed.scratch.keys[:40].isfinite().all())
    assert bool(timed.scratch.keys[40:].isnan().all())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="9 rows do not end a context of 8"):
        prefill("bf16", 9, 8)
    with pytest.raises(ValueError, match="no multiple of a page"):
        prefill("bf16", 1, 8, piece_tokens=100)

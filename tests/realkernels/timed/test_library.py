"""Library kernels of a dense layer against float64: fused and plain, alone and chained; broken ones are noticed."""

from typing import Any

import pytest
import torch
from realkernels.library import LibraryAttention, LibraryProducts, flash, flash_missing, random_weights
from realkernels.library_elementwise import TORCH_OPS, ElementwiseOps, LibraryAppend, LibraryElementwise
from realkernels.library_layer import LibraryLayers
from torch.nn.attention.bias import CausalVariant

from realkernels import library, library_kernels
from realkernels.shape import DenseShape

CPU = torch.device("cpu")
SMALL = DenseShape(hidden=48, query_heads=6, kv_heads=2, head_dim=16, intermediate=72)
"""Widths that are no powers of two, 3 query heads to a KV head."""

FUSED_OPS = ElementwiseOps(
    library_kernels.add_norm, library_kernels.rotate, library_kernels.append, library_kernels.gate
)
OPS = {"torch": TORCH_OPS, "fused": FUSED_OPS}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BOTH_TYPES = [torch.float32, torch.bfloat16]


def nothing(*_args: object) -> None:
    return


def place(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"dtype": dtype, "device": CPU}


def test_a_layer_of_llama_3_1_8b_has_its_published_parameters() -> None:
    shape = DenseShape()
    assert shape.parameters == 4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096
    assert 32 * shape.parameters + 2 * 128256 * 4096 + 65 * 4096 == 8_030_261_248
    assert shape.appended == 4 * 1024
    assert shape.elementwise == 8 * 4096 + 2 * 5120 + 3 * 14336


def test_operations_of_attention_leave_the_future_out() -> None:
    one = DenseShape(query_heads=1, kv_heads=1, head_dim=1)
    assert one.attend_flops(batch=1, rows=1, past=9) == 4 * 10
    assert one.attend_flops(batch=2, rows=3, past=0) == 2 * 4 * (1 + 2 + 3)
    assert one.attend_flops(batch=1, rows=3, past=5, causal=False) == 4 * 3 * 8


@pytest.mark.parametrize(("change", "words"), [({"kv_heads": 3}, "32 query heads"), ({"hidden": 0}, "below 1")])
def test_impossible_shapes_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DenseShape(**change)


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_products_agree_with_float64(tokens: int, dtype: torch.dtype) -> None:
    weights = [random_weights(SMALL, dtype, CPU) for _ in range(2)]
    products = LibraryProducts(SMALL, tokens=tokens, weights=weights, **place(dtype))
    assert products.verify() < TOLERANCE[dtype]
    products.poison()
    assert not products.finite()
    products.run()
    assert products.finite()


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("ops", OPS)
def test_what_lies_between_agrees_with_float64(ops: str, tokens: int, dtype: torch.dtype) -> None:
    between = LibraryElementwise(SMALL, tokens=tokens, layers=2, ops=OPS[ops], **place(dtype))
    assert between.verify() < TOLERANCE[dtype]
    between.poison()
    assert not between.finite()
    between.run()
    assert between.finite()


@pytest.mark.parametrize("left_out", ElementwiseOps._fields[:2] + ElementwiseOps._fields[3:])
def test_a_kernel_that_does_nothing_is_noticed(left_out: str) -> None:
    broken = TORCH_OPS._replace(**{left_out: nothing})
    assert LibraryElementwise(SMALL, tokens=5, layers=1, ops=broken, **place()).verify() > 0.1
    assert LibraryLayers(SMALL, layers=1, batch=2, rows=1, past=9, ops=broken, **place()).verify() > 0.1


@pytest.mark.parametrize("ops", OPS)
def test_every_token_goes_to_its_slot(ops: str) -> None:
    written = LibraryAppend(SMALL, tokens=9, layers=2, ops=OPS[ops], **place(torch.bfloat16))
    assert written.verify() == 0.0
    assert written.finite()
    written.slots = written.slots.flip(0)  # as if a kernel had mixed tokens up
    written.ops = written.ops._replace(append=nothing)
    assert written.verify() == float("inf")


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize(
    ("batch", "rows", "past"), [(1, 1, 40), (3, 1, 17), (1, 24, 0), (1, 24, 33)], ids=["one", "some", "start", "chunk"]
)
def test_attention_agrees_with_float64(batch: int, rows: int, past: int, dtype: torch.dtype) -> None:
    attention = LibraryAttention(SMALL, batch=batch, rows=rows, past=past, caches=2, **place(dtype))
    assert attention.verify() < TOLERANCE[dtype]
    assert attention.cache_bytes == 2 * batch * (past + rows) * 2 * 16 * dtype.itemsize
    masked = rows == 1 or past == 0  # the CPU's flash attention has no mask that leaves a past alone
    assert attention.flops == SMALL.attend_flops(batch=batch, rows=rows, past=past, causal=masked)


def test_attention_over_the_wrong_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = LibraryAttention(SMALL, batch=1, rows=8, past=0, caches=1, **place())
    monkeypatch.setattr(library, "flash", lambda query, keys, values, **_: flash(query, keys, values, causal=False))
    assert attention.verify() > 0.1


def test_a_chunk_after_a_past_is_masked_from_the_lower_right(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def fake(query: torch.Tensor, _keys: torch.Tensor, _values: torch.Tensor, **how: Any) -> torch.Tensor:
        asked.append(how)
        return query

    monkeypatch.setattr(library, "scaled_dot_product_attention", fake)
    query, keys = torch.zeros(1, 8, 6, 16), torch.zeros(1, 20, 2, 16)
    flash(query, keys, keys, causal=True)
    mask = asked[0]["attn_mask"]
    assert (mask.variant, mask.seq_len_q, mask.seq_len_kv) == (CausalVariant.LOWER_RIGHT, 8, 20)
    flash(query[:, :1], keys, keys, causal=True)
    flash(query, query, query, causal=True)
    assert [how["is_causal"] for how in asked[1:]] == [False, True]


def test_a_torch_without_flash_attention_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_missing(SMALL, **place()) == ""

    def refuse(*_args: object, **_named: object) -> None:
        import warnings

        warnings.warn(
            "Flash attention only supports gpu architectures from sm80 on. (Triggered at x.cpp)", stacklevel=2
        )
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(library, "scaled_dot_product_attention", refuse)
    reason = flash_missing(SMALL, **place())
    assert reason == "no flash attention here: Flash attention only supports gpu architectures from sm80 on."


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(("batch", "rows", "past"), [(1, 1, 20), (3, 1, 11), (1, 13, 0), (2, 6, 0)])
def test_a_whole_layer_agrees_with_float64(batch: int, rows: int, past: int, ops: str, dtype: torch.dtype) -> None:
    layers = LibraryLayers(SMALL, layers=2, batch=batch, rows=rows, past=past, ops=OPS[ops], **place(dtype))
    assert layers.verify() < 3 * TOLERANCE[dtype]
    layers.poison()
    assert not layers.finite()
    layers.run()
    assert layers.finite()


def test_keys_that_are_not_in_the_cache_are_noticed() -> None:
    layers = LibraryLayers(SMALL, layers=1, batch=2, rows=1, past=9, **place())
    layers.ops = layers.ops._replace(append=nothing)
    assert layers.verify() == float("inf")


def test_a_chunk_that_cannot_be_masked_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot mask"):
        LibraryLayers(SMALL, layers=1, batch=1, rows=4, past=8, **place())

"""Library kernels of a dense layer against float64: fused and plain, alone and chained; broken ones are noticed."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalVariant

from realkernels.kernels import dense, in_torch
from realkernels.shape import DenseShape
from realkernels.timed import library
from realkernels.timed.call import TimedCall
from realkernels.timed.library import (
    TEMPERATURE,
    DenseLayers,
    Elementwise,
    FlashAttention,
    Linear,
    PlainAppend,
    Sampling,
    flash,
    flash_missing,
    random_weights,
)
from tests.realkernels.worlds import CPU

SMALL = DenseShape(hidden=48, query_heads=6, kv_heads=2, head_dim=16, intermediate=72)
"""Widths that are no powers of two, 3 query heads to a KV head."""

OPS = {"torch": in_torch, "fused": dense}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BOTH_TYPES = [torch.float32, torch.bfloat16]


def place(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"dtype": dtype, "device": CPU}


def broken(name: str) -> Any:
    """Kernels of which one does nothing."""
    ops = {each: getattr(in_torch, each) for each in ("add_norm", "rotate", "append", "gate")}
    return SimpleNamespace(**ops | {name: lambda *_args: None})


def check(call: TimedCall, tolerance: float) -> None:
    """Right, and not finite until it has run."""
    assert call.verify() <= tolerance
    assert call.finite()
    call.poison()
    assert not call.finite()


def test_a_layer_of_llama_3_1_8b_has_its_published_parameters() -> None:
    shape = DenseShape()
    assert shape.parameters == 4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096
    assert 32 * shape.parameters + 2 * 128256 * 4096 + 65 * 4096 == 8_030_261_248
    assert shape.appended == 4 * 1024
    assert shape.elementwise == 8 * 4096 + 2 * 5120 + 3 * 14336


def test_operations_of_attention_leave_the_future_out() -> None:
    one = DenseShape(query_heads=1, kv_heads=1, head_dim=1)
    assert one.attend_flops(batch=1, q_tokens=1, past_tokens=9) == 4 * 10
    assert one.attend_flops(batch=2, q_tokens=3, past_tokens=0) == 2 * 4 * (1 + 2 + 3)
    assert one.attend_flops(batch=1, q_tokens=3, past_tokens=5, causal=False) == 4 * 3 * 8


@pytest.mark.parametrize(("change", "words"), [({"kv_heads": 3}, "32 query heads"), ({"hidden": 0}, "below 1")])
def test_impossible_shapes_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DenseShape(**change)


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("ops", OPS)
def test_parts_agree_with_float64(monkeypatch: pytest.MonkeyPatch, ops: str, tokens: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(library, "elementwise_ops", lambda _device: OPS[ops])
    weights = [random_weights(SMALL, dtype, CPU) for _ in range(2)]
    check(Linear(SMALL, tokens=tokens, weights=weights, **place(dtype)), TOLERANCE[dtype])
    check(Elementwise(SMALL, tokens=tokens, layers=2, **place(dtype)), TOLERANCE[dtype])
    check(PlainAppend(SMALL, tokens=tokens, layers=2, **place(dtype)), 0.0)


@pytest.mark.parametrize("number", range(4))
def test_a_product_that_is_not_made_is_noticed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    made: list[int] = []
    product = library.product

    def all_but_one(*given: torch.Tensor) -> None:
        made.append(0)
        if len(made) != number + 1:
            product(*given)

    monkeypatch.setattr(library, "product", all_but_one)
    weights = [random_weights(SMALL, torch.float32, CPU)]
    assert Linear(SMALL, tokens=5, weights=weights, **place()).verify() == math.inf


@pytest.mark.parametrize("left_out", ["add_norm", "rotate", "gate", "append"])
def test_a_kernel_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    ops = broken(left_out)
    monkeypatch.setattr(library, "elementwise_ops", lambda _device: ops)
    error = DenseLayers(SMALL, layers=1, batch=2, q_tokens=1, past_tokens=9, **place()).verify()
    if left_out == "append":
        assert error == math.inf
    else:
        assert min(error, Elementwise(SMALL, tokens=5, layers=1, **place()).verify()) > 0.1


def test_tokens_that_are_misplaced_are_noticed() -> None:
    written = PlainAppend(SMALL, tokens=9, layers=2, **place(torch.bfloat16))
    written.run()
    written.slots = written.slots.flip(0)  # as if a kernel had mixed tokens up
    assert written.error() == math.inf


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize(("batch", "q_tokens", "past"), [(1, 1, 40), (3, 1, 17), (1, 24, 0), (1, 24, 33)])
def test_attention_agrees_with_float64(batch: int, q_tokens: int, past: int, dtype: torch.dtype) -> None:
    attention = FlashAttention(SMALL, batch=batch, q_tokens=q_tokens, past_tokens=past, caches=2, **place(dtype))
    check(attention, TOLERANCE[dtype])
    assert attention.moved_bytes == 2 * batch * (past + q_tokens) * 2 * 16 * dtype.itemsize
    masked = q_tokens == 1 or past == 0  # the CPU's flash attention has no mask that leaves a past alone
    counted = SMALL.attend_flops(batch=batch, q_tokens=q_tokens, past_tokens=past, causal=masked)
    assert (attention.calls, attention.flops) == (2, counted)


def test_attention_over_the_wrong_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = FlashAttention(SMALL, batch=1, q_tokens=8, past_tokens=0, caches=1, **place())
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

        warnings.warn("Flash attention only supports sm80 on. (Triggered at x.cpp)", stacklevel=2)
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(library, "scaled_dot_product_attention", refuse)
    assert flash_missing(SMALL, **place()) == "no flash attention here: Flash attention only supports sm80 on."


@pytest.mark.parametrize("dtype", BOTH_TYPES)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(("batch", "q_tokens", "past"), [(1, 1, 20), (3, 1, 11), (2, 6, 0)])
def test_whole_layers_agree_with_float64(batch: int, q_tokens: int, past: int, ops: str, dtype: torch.dtype) -> None:
    size = {"batch": batch, "q_tokens": q_tokens, "past_tokens": past}
    made = DenseLayers(SMALL, layers=2, **size, **place(dtype))
    made.ops = OPS[ops]
    check(made, 3 * TOLERANCE[dtype])


def test_a_chunk_that_cannot_be_masked_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot mask"):
        DenseLayers(SMALL, layers=1, batch=1, q_tokens=4, past_tokens=8, **place())


# Sampling: draws follow the softmax at its temperature, row by row

LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -torch.inf])
DRAWS = 40_000


def sampling(logits: torch.Tensor) -> Sampling:
    """Drawn from these rows."""
    torch.manual_seed(1)
    made = Sampling(tokens=logits.shape[0], vocab=logits.shape[1], device=CPU)
    made.logits.copy_(logits)
    made.run()
    return made


def test_draws_follow_the_softmax_at_its_temperature() -> None:
    drawn = sampling(LOGITS.repeat(DRAWS, 1)).output
    found = torch.bincount(drawn, minlength=LOGITS.numel()).double() / DRAWS
    wanted = torch.softmax(LOGITS.double() / TEMPERATURE, dim=0)
    assert found[-1] == 0  # no share, no draw
    deviations = ((found - wanted) / (wanted * (1 - wanted) / DRAWS).sqrt())[:-1]
    assert deviations.abs().max() < 4
    assert (torch.softmax(LOGITS.double(), dim=0) - wanted).abs().max() > 0.02  # what no temperature would give


def test_every_row_is_drawn_from_its_own_logits_and_anew() -> None:
    wanted = torch.randperm(50)
    assert torch.equal(sampling(torch.nn.functional.one_hot(wanted, 50) * 100.0).output, wanted)
    made = sampling(torch.zeros(64, 1000))
    first = made.output.clone()
    made.run()
    assert (made.output != first).sum() > 48


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 2), (1, 128_256), (7, 1001), (64, 33)])
def test_a_draw_agrees_with_float64(tokens: int, vocab: int) -> None:
    made = Sampling(tokens=tokens, vocab=vocab, device=CPU)
    check(made, 1e-5)
    made.run()
    assert 0 <= int(made.output.min()) <= int(made.output.max()) < vocab


def _one_row_wrong(shares: torch.Tensor) -> torch.Tensor:
    drawn = shares.argmin(dim=1)
    drawn[:-1] = shares.max(dim=1).indices[:-1]
    return drawn


WRONG_DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "the first token": lambda shares: torch.zeros(len(shares)).long(),
    "the second best": lambda shares: shares.topk(2, dim=1).indices[:, 1],
    "one row wrong": _one_row_wrong,
    "of another row": lambda shares: shares.max(dim=1).indices.roll(1),
    "none": lambda _shares: None,
}


@pytest.mark.parametrize("draw", WRONG_DRAWS.values(), ids=WRONG_DRAWS)
def test_a_wrong_draw_is_noticed(monkeypatch: pytest.MonkeyPatch, draw: Callable[..., torch.Tensor | None]) -> None:
    def drawn(shares: torch.Tensor, *, out: torch.Tensor, **_how: Any) -> None:
        made = draw(shares)
        if made is not None:
            out.copy_(made)

    made = Sampling(tokens=16, vocab=500, device=CPU)
    made.run()  # so that tokens lie there
    monkeypatch.setattr(library.torch, "argmax", drawn)
    assert made.verify() > 0.01


def test_a_draw_without_noise_or_from_stale_logits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sampling(tokens=16, vocab=500, device=CPU)
    made.run()
    made.logits.normal_()
    assert made.error() > 0.01
    monkeypatch.setattr(torch.Tensor, "div_", lambda shares, _noise: shares)
    assert made.verify() > 0.01

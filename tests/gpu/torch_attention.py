"""torch's own attention at a decode step, back end by back end, over bf16 caches that lie in one piece."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

QUERY_HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
ENOUGH_S = 105.0
"""After this flex_attention, which has to be compiled for every shape, is left out."""

BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""`math` is left out: it writes every score and a copy of the cache for each query head."""

Work = Callable[[], object]


def torch_attentions(
    *, batch: int, ctx_tokens: int, query_tokens: int, device: torch.device, late: bool
) -> Iterator[tuple[str, Work, int]]:
    """(name, what to time, bytes of K and V) of each; unmasked, which costs what a mask of the last tokens does."""

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device).transpose(1, 2)

    query, keys, values = random(query_tokens, QUERY_HEADS), random(ctx_tokens, KV_HEADS), random(ctx_tokens, KV_HEADS)
    nbytes = keys.nbytes + values.nbytes
    for name, backend in BACKENDS.items():
        yield name, _sdpa(backend, query, keys, values), nbytes
    if late:
        yield "torch flex", _too_late, nbytes
    else:
        yield "torch flex", _flex(query, keys, values), nbytes


def _sdpa(backend: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Work:
    def work() -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return work


def _flex(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Work:
    def work() -> object:
        return _compiled()(query, keys, values, enable_gqa=True)

    return work


def _compiled() -> Callable[..., object]:
    from torch.nn.attention.flex_attention import flex_attention

    if "flex" not in _KEPT:
        _KEPT["flex"] = torch.compile(flex_attention, dynamic=False)
    return _KEPT["flex"]


_KEPT: dict[str, Callable[..., object]] = {}


def _too_late() -> object:
    raise RuntimeError(f"{ENOUGH_S:.0f} s are spent: not compiled")

"""Sparse decode attention over a codec's interleaved blocks in host memory, as a timed call, on a GPU or on the CPU."""

from typing import Any

import torch

from realkernels import reference
from realkernels.bounds import check_selected
from realkernels.caches.interleaved import InterleavedCache
from realkernels.kernels import in_torch
from realkernels.timed.call import TimedCall, relative_error


class GatherBlocks(TimedCall):
    """Attention of the last of `ctx_tokens` tokens over a fresh selection in every layer of a cache, one after another.

    Rotations of queries and outputs are part of a call. ValueError for a context beyond the cache, and for one with
    fewer complete blocks than are selected.
    """

    def __init__(self, cache: InterleavedCache, *, ctx_tokens: int) -> None:
        shape, device = cache.shape, cache.device
        if ctx_tokens > cache.tokens or shape.blocks(ctx_tokens) < shape.topk:
            raise ValueError(f"a context of {ctx_tokens} tokens: {shape.budget} to {cache.tokens} can be gathered here")
        self.cache, self.shape, self.ctx_tokens, self.calls = cache, shape, ctx_tokens, len(cache.layers)
        self.link_bytes = self.moved_bytes = (shape.budget + ctx_tokens % shape.ratio) * cache.token_bytes
        size = (self.calls, shape.query_heads, shape.head_dim)
        self.query = torch.empty(size, dtype=torch.float16, device=device)
        self.output = torch.empty_like(self.query)
        self.selected = torch.empty(self.calls, shape.topk, dtype=torch.int32, device=device)
        kernels: Any = in_torch
        if device.type == "cuda":
            from realkernels.kernels import gather as kernels  # noqa: PLC0415 - needs triton
        self._gather = kernels.InterleavedGather(cache.codec, shape, device=device)
        self.poison()

    def run(self) -> None:
        """Every layer."""
        for layer, planes in enumerate(self.cache.layers):
            self._gather.run(
                self.query[layer], planes, self.selected[layer], self.ctx_tokens, self.output[layer], checked=False
            )

    def poison(self) -> None:
        """NaN in the output, fresh queries, any blocks in any order."""
        self.query.normal_()
        for row in self.selected:
            row.copy_(torch.randperm(self.shape.blocks(self.ctx_tokens), device=row.device)[: self.shape.topk])
        self.output.fill_(float("nan"))

    def error(self) -> float:
        """Of the worst layer, against float64 attention over the dequantised selection."""
        try:
            check_selected(self.selected, blocks=self.shape.blocks(self.ctx_tokens))
        except IndexError:
            return float("inf")
        if not self.finite():
            return float("inf")
        worst = 0.0
        for layer in range(self.calls):
            tokens = reference.selected_tokens(self.selected[layer].long(), self.ctx_tokens, self.shape.ratio)
            truth = reference.attend(self.query[layer], *self.cache.rows(layer, tokens))
            worst = max(worst, relative_error(self.output[layer], truth))
        return worst

"""Sparse attention as timed calls over an opened cache: a decode step, a prefill chunk, their parts.

`GatherBlocks` reads interleaved blocks of a codec (`caches/interleaved.py`), the others planes (`caches/qsa.py`).

A NaN or infinity in K or V reaches the outputs of the query heads that share its KV head, of tokens that selected it;
no other head, token or layer, and nothing at all while it is not selected or lies beyond the context. In pooled keys a
product that is NaN counts as 0 and an infinite one as the best.
"""

from abc import abstractmethod
from typing import Any, Literal

import torch

from realkernels import reference
from realkernels.bounds import check_rows, check_selected
from realkernels.caches.interleaved import InterleavedCache
from realkernels.caches.qsa import PAGE_TOKENS, QsaCache
from realkernels.device import vram_for
from realkernels.kernels import gather, in_torch, select, sparse_prefill
from realkernels.kernels.sparse_prefill import select_rows
from realkernels.timed.call import TimedCall, relative_error

SCORE_TOLERANCE = 1e-4
"""Allowed difference of a float32 score, relative to 1 + the score in float64."""

CHECKED_ROWS = 8
"""Tokens of a chunk of which a result is checked: the first, the last and random ones between."""

BACKBONE_WIDTH = 4096

Copies = Literal["serial", "overlapped"]


def kv_bytes(cache: QsaCache, tokens: int) -> int:
    """K and V of so many tokens in one layer."""
    return tokens * 2 * cache.shape.kv_heads * cache.shape.head_dim * cache.dtype.itemsize


class _Decode(TimedCall):
    """One new token, the last of a context of `ctx_tokens`, in every layer of a cache.

    ValueError for a context beyond the planes, and for one with fewer complete blocks than are selected: it is read
    whole.
    """

    def __init__(self, cache: QsaCache, *, ctx_tokens: int) -> None:
        shape, device = cache.shape, cache.device
        if ctx_tokens > cache.tokens:
            raise ValueError(f"a context of {ctx_tokens} tokens does not fit planes of {cache.tokens}")
        if shape.blocks(ctx_tokens) < shape.topk:
            raise ValueError(
                f"a context of {ctx_tokens} tokens has {shape.blocks(ctx_tokens)} complete blocks, fewer than the "
                f"{shape.topk} that are selected: it is read whole; the shortest sparse context is {shape.budget}"
            )
        self.cache, self.ctx_tokens, self.calls = cache, ctx_tokens, cache.layers
        self.query = torch.empty(cache.layers, shape.query_heads, shape.head_dim, dtype=cache.dtype, device=device)
        self.index_query = torch.empty(
            cache.layers, shape.index_heads, shape.index_dim, dtype=cache.dtype, device=device
        )
        self.selected = torch.empty(cache.layers, shape.topk, dtype=torch.int32, device=device)
        """Written by selection, read by the gather; order within a row is free."""
        self.output = torch.empty_like(self.query)
        selections: Any = select if cache.triton else in_torch
        gathers: Any = gather if cache.triton else in_torch
        with vram_for("a decode step", 8 * shape.blocks(ctx_tokens), device):  # mostly its scores
            self._selection = selections.Selection(shape, most_blocks=shape.blocks(ctx_tokens), device=device)
            self._gather = gathers.PlaneGather(shape, device=device)
        self.poison()

    def poison(self) -> None:
        """Fresh queries, NaN in the outputs, nothing selected."""
        self.query.normal_()
        self.index_query.normal_()
        self.selected.fill_(-1)
        self.output.fill_(float("nan"))

    def select_layer(self, layer: int, selected: torch.Tensor) -> torch.Tensor:
        """Selection of one layer into `selected` -> the scores that it was made by, until the next."""
        scores: torch.Tensor = self._selection.run(self.index_query[layer], self._pooled(layer), selected)
        return scores

    def gather_layer(self, layer: int) -> None:
        """Sparse attention of one layer over `selected`."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._gather.run(self.query[layer], keys, values, self.selected[layer], self.ctx_tokens, self.output[layer])

    def select(self) -> None:
        """Selection of every layer."""
        for layer, selected in enumerate(self.selected):
            self.select_layer(layer, selected)

    def _pooled(self, layer: int) -> torch.Tensor:
        """Pooled keys of the complete blocks of the context."""
        return self.cache.pooled_keys[layer][: self.cache.shape.blocks(self.ctx_tokens)]

    def selection_error(self) -> float:
        """0 where every layer's selection is exactly the reference's, infinite otherwise.

        Exactly: the best by the kernel's own float32 scores, ties to the lower index, and those scores are the float64
        ones within SCORE_TOLERANCE.
        """
        try:
            check_selected(self.selected, blocks=self.cache.shape.blocks(self.ctx_tokens))
        except IndexError:
            return float("inf")
        for layer in range(self.cache.layers):
            own = self.select_layer(layer, torch.empty_like(self.selected[layer]))
            best = reference.select_blocks(own, self.cache.shape.topk)
            scores = reference.block_scores(self.index_query[layer], self._pooled(layer))
            near = bool(((own.double() - scores).abs() <= SCORE_TOLERANCE * (1.0 + scores)).all())
            if not near or not torch.equal(self.selected[layer].long().sort().values, best):
                return float("inf")
        return 0.0

    def error(self) -> float:
        """Of the worst layer's attention over what was selected; infinite where that is not what should have been."""
        if self.selection_error() or not self.finite():
            return float("inf")
        return max(self._layer_error(layer) for layer in range(self.cache.layers))

    def _layer_error(self, layer: int) -> float:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        chosen = self.selected[layer].long()
        truth = reference.sparse_attend(self.query[layer], keys, values, chosen, self.ctx_tokens, self.cache.shape)
        return relative_error(self.output[layer], truth)


class DecodeSelect(_Decode):
    """Selection of every layer."""

    def __init__(self, cache: QsaCache, *, ctx_tokens: int) -> None:
        super().__init__(cache, ctx_tokens=ctx_tokens)
        self.moved_bytes = cache.shape.blocks(ctx_tokens) * cache.shape.index_dim * cache.dtype.itemsize

    def run(self) -> None:
        """Score, pick, finish: three launches a layer."""
        self.select()

    def finite(self) -> bool:
        """Whether every layer has selected."""
        return bool((self.selected >= 0).all())

    def error(self) -> float:
        """0 or infinite: a selection is right or wrong."""
        return self.selection_error()


class DecodeGather(_Decode):
    """Sparse attention of every layer over a selection that `poison` makes.

    Fresh blocks, or a second repeat would find them in the device's own caches.
    """

    def __init__(self, cache: QsaCache, *, ctx_tokens: int) -> None:
        super().__init__(cache, ctx_tokens=ctx_tokens)
        self.moved_bytes = kv_bytes(cache, cache.shape.budget)
        self.link_bytes = self.moved_bytes if cache.tier == "host" else 0.0

    def poison(self) -> None:
        """Fresh queries and their selection, NaN in the outputs."""
        super().poison()
        self.select()

    def run(self) -> None:
        """Attend in splits, combine: two launches a layer."""
        for layer in range(self.cache.layers):
            self.gather_layer(layer)


class DecodeStep(_Decode):
    """Both, layer by layer, as a model would; a run is one call.

    Behind matrix-vector products with `backbone_bytes` of bf16 weights, a matrix of its own for each layer, which stand
    for what else a model does in it; 0 leaves them out.
    """

    def __init__(self, cache: QsaCache, *, ctx_tokens: int, backbone_bytes: int = 0) -> None:
        super().__init__(cache, ctx_tokens=ctx_tokens)
        self.calls = 1
        self.link_bytes = cache.layers * kv_bytes(cache, cache.shape.budget) if cache.tier == "host" else 0.0
        size = (backbone_bytes // 2 // BACKBONE_WIDTH, BACKBONE_WIDTH)
        made = {"dtype": torch.bfloat16, "device": cache.device}
        self._matrices = [torch.randn(size, **made) for _ in range(cache.layers if backbone_bytes else 0)]
        self._vector, self._product = torch.randn(BACKBONE_WIDTH, **made), torch.empty(size[0], **made)

    def run(self) -> None:
        """Five launches a layer, nothing that waits, so that all layers fit one CUDA graph."""
        for layer in range(self.cache.layers):
            if self._matrices:
                torch.mv(self._matrices[layer], self._vector, out=self._product)
            self.select_layer(layer, self.selected[layer])
            self.gather_layer(layer)


class _Chunk(TimedCall):
    """The newest `q_tokens` of `ctx_tokens` tokens of one sequence, in the first layer of a cache."""

    def __init__(self, cache: QsaCache, *, ctx_tokens: int, q_tokens: int) -> None:
        shape, device, past = cache.shape, cache.device, ctx_tokens - q_tokens
        if q_tokens < 1 or past < 0 or ctx_tokens > cache.tokens:
            raise ValueError(f"rows {past} to {ctx_tokens - 1} do not lie in planes of {cache.tokens} tokens")
        self.cache, self.past, self.q_tokens = cache, past, q_tokens
        scores = min(q_tokens, 1024) * shape.blocks(ctx_tokens) * (shape.index_heads * cache.dtype.itemsize + 4)
        with vram_for(f"a prefill chunk of {q_tokens} rows (mostly its scores)", scores, device):
            self.query = torch.empty(q_tokens, shape.query_heads, shape.head_dim, dtype=cache.dtype, device=device)
            self.index_query = torch.empty(
                q_tokens, shape.index_heads, shape.index_dim, dtype=cache.dtype, device=device
            )
            self.selection = torch.empty(q_tokens, shape.topk + 1, dtype=torch.int32, device=device)
            """Of each token: blocks ascending, its open block, then `rows.NO_BLOCK`."""
            self.output = torch.empty_like(self.query)
            self.poison()

    @abstractmethod
    def blank(self) -> None:
        """Poison outputs alone."""

    def select(self) -> None:
        """Selection of every token (score all pooled keys, keep the best)."""
        self.selection.copy_(select_rows(self.index_query, self.cache.pooled_keys[0], self.past, self.cache.shape))

    def _checked_rows(self) -> list[int]:
        drawn = torch.randint(self.q_tokens, (max(0, CHECKED_ROWS - 2),)).tolist()
        return sorted({0, self.q_tokens - 1, *drawn})

    def _blocks(self, row: int) -> torch.Tensor:
        """Complete blocks that a token selected."""
        chosen = self.selection[row].long()
        return chosen[chosen < self.cache.shape.blocks(self.past + row + 1)]

    def _sees_only_its_past(self) -> bool:
        try:
            check_rows(self.selection, past=self.past, shape=self.cache.shape)
        except IndexError:
            return False
        return True


class PrefillSelect(_Chunk):
    """Selection of every token of a chunk."""

    def __init__(self, cache: QsaCache, *, ctx_tokens: int, q_tokens: int) -> None:
        super().__init__(cache, ctx_tokens=ctx_tokens, q_tokens=q_tokens)
        shape = cache.shape
        self.flops = 2.0 * q_tokens * shape.blocks(ctx_tokens) * shape.index_heads * shape.index_dim

    def run(self) -> None:
        """By `rows.select_rows`."""
        self.select()

    def poison(self) -> None:
        """Fresh index queries, nothing selected."""
        self.index_query.normal_()
        self.blank()

    def blank(self) -> None:
        """Nothing selected."""
        self.selection.fill_(-1)

    def finite(self) -> bool:
        """Whether every token has selected."""
        return bool((self.selection >= 0).all())

    def error(self) -> float:
        """0, or infinite where some token holds too few blocks, or leaves one out that is better than one it holds.

        Better by more than the rounding of products to the planes' precision, that is.
        """
        right = self._sees_only_its_past() and all(self._holds_the_best(row) for row in self._checked_rows())
        return 0.0 if right else float("inf")

    def _holds_the_best(self, row: int) -> bool:
        shape = self.cache.shape
        blocks, held = shape.blocks(self.past + row + 1), self._blocks(row)
        if len(held) != min(shape.topk, blocks):
            return False
        scores = reference.block_scores(self.index_query[row], self.cache.pooled_keys[0][:blocks])
        left = torch.ones(blocks, dtype=torch.bool, device=scores.device)
        left[held] = False
        if not len(held) or not bool(left.any()):
            return True
        rounding = 4 * torch.finfo(self.query.dtype).eps * float(scores.max())
        return float(scores[left].max()) <= float(scores[held].min()) + rounding


class PrefillAttend(_Chunk):
    """Sparse attention of a chunk, in place (`bucket_tokens` 0) or through buckets of device memory.

    Staged, whole pages of 256 tokens are copied, by `copies`: "serial", or "overlapped" with the attention. Counted
    bytes are those; in place those of every token's selection where they cross the link.
    """

    def __init__(
        self, cache: QsaCache, *, ctx_tokens: int, q_tokens: int, bucket_tokens: int = 0, copies: Copies = "overlapped"
    ) -> None:
        shape = cache.shape
        if copies not in ("serial", "overlapped"):
            raise ValueError(f"no copies {copies!r}; there are serial and overlapped")
        if bucket_tokens < 0 or bucket_tokens % shape.ratio:
            raise ValueError(f"bucket_tokens is {bucket_tokens}, not a multiple of {shape.ratio} from 0 on")
        super().__init__(cache, ctx_tokens=ctx_tokens, q_tokens=q_tokens)
        self._read_tokens = cache.tokens
        if bucket_tokens:
            self._read_tokens = min(-(-ctx_tokens // PAGE_TOKENS) * PAGE_TOKENS, cache.tokens)
            self.moved_bytes = kv_bytes(cache, self._read_tokens)
        elif cache.tier == "host":
            self.moved_bytes = q_tokens * kv_bytes(cache, shape.budget)
        self.link_bytes = self.moved_bytes if cache.tier == "host" else 0.0
        kernels: Any = sparse_prefill if cache.triton else in_torch
        self._attention = kernels.ChunkAttention(
            shape, q_tokens=q_tokens, bucket_tokens=bucket_tokens, copies=copies, dtype=cache.dtype,
            device=cache.device,
        )  # fmt: skip

    def run(self) -> None:
        """Attention of every token over its selection."""
        keys, values = (plane[0][: self._read_tokens] for plane in (self.cache.keys, self.cache.values))
        self._attention.run(self.query, keys, values, self.selection, self.past, self.output)

    def poison(self) -> None:
        """Fresh queries and their selection, NaN in the output."""
        self.query.normal_()
        self.index_query.normal_()
        self.select()
        self.blank()

    def blank(self) -> None:
        """NaN in the output."""
        self.output.fill_(float("nan"))

    def error(self) -> float:
        """Of the worst of some tokens, given their selection; infinite where it holds what a token must not see."""
        if not self.finite() or not self._sees_only_its_past():
            return float("inf")
        keys, values = self.cache.keys[0], self.cache.values[0]
        worst = 0.0
        for row in self._checked_rows():
            seen = self.past + row + 1
            truth = reference.sparse_attend(self.query[row], keys, values, self._blocks(row), seen, self.cache.shape)
            worst = max(worst, relative_error(self.output[row], truth))
        return worst


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
        kernels: Any = gather if device.type == "cuda" else in_torch
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

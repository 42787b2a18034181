"""What a decode step and a prefill chunk share on every backend: their tensors, their limits and their checks."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from realkernels import reference
from realkernels.backend import Copies, Mode, QsaCache
from realkernels.bounds import check_rows, check_selected

PAGE_TOKENS = 256
"""Staging copies whole pages of the cache, as the published engine does (exllamav3 `constants.py`)."""

SCORE_TOLERANCE = 1e-4
"""Allowed difference of a float32 score, relative to 1 + the score in float64."""


def relative_error(output: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN stays NaN."""
    return float((output.double() - truth).norm() / truth.norm())


def worst(errors: list[float]) -> float:
    """The largest; NaN if any is NaN."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


class DecodeBase(ABC):
    """`backend.DecodeStep` but for its two kernels. Queries are random until they are overwritten.

    ValueError for a context beyond the planes, and for one with fewer complete blocks than are selected: it is read
    whole.
    """

    def __init__(self, cache: QsaCache, *, end: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = cache.shape
        if end > cache.tokens:
            raise ValueError(f"a context of {end} tokens does not fit planes of {cache.tokens}")
        if shape.blocks(end) < shape.topk:
            raise ValueError(
                f"a context of {end} tokens has {shape.blocks(end)} complete blocks, fewer than the {shape.topk} that "
                f"are selected: it is read whole; the shortest sparse context is {shape.budget} tokens"
            )
        self.cache, self.end, self.device = cache, end, device
        source = torch.Generator(device).manual_seed(0)
        heads, index = (shape.query_heads, shape.head_dim), (shape.index_heads, shape.index_dim)
        layers = cache.layers
        self.query = torch.randn(layers, *heads, generator=source, device=device).to(dtype)
        self.index_query = torch.randn(layers, *index, generator=source, device=device).to(dtype)
        self.selected = torch.full((layers, shape.topk), -1, dtype=torch.int32, device=device)
        self.output = torch.full_like(self.query, float("nan"))

    @abstractmethod
    def select_layer(self, layer: int) -> None:
        """Selection of one layer into `selected`."""

    @abstractmethod
    def gather_layer(self, layer: int) -> None:
        """Sparse attention of one layer over `selected` into `output`."""

    @abstractmethod
    def scores(self, layer: int) -> torch.Tensor:
        """The kernel's own scores of one layer for the present queries, float32 [blocks]; `selected` stays as it is."""

    def select(self) -> None:
        """Selection of every layer."""
        for layer in range(self.cache.layers):
            self.select_layer(layer)

    def gather(self) -> None:
        """Sparse attention of every layer over `selected`."""
        for layer in range(self.cache.layers):
            self.gather_layer(layer)

    def run(self, *, before_layer: Callable[[int], object] | None = None) -> None:
        """Both, layer by layer, as a model would; `before_layer` stands in for what a model does in between."""
        for layer in range(self.cache.layers):
            if before_layer is not None:
                before_layer(layer)
            self.select_layer(layer)
            self.gather_layer(layer)

    def pooled(self, layer: int) -> torch.Tensor:
        """Pooled keys of the complete blocks of the context."""
        return self.cache.pooled_keys[layer][: self.cache.shape.blocks(self.end)]

    def verify(self) -> tuple[bool, float]:
        """(selection is exactly the reference's, worst relative error of the output against float64) of the last run.

        Exactly: the best by the kernel's own float32 scores, ties to the lower index, and those scores are the float64
        ones within SCORE_TOLERANCE. Raises IndexError if `selected` holds an index that is out of range, or one twice.
        """
        shape = self.cache.shape
        check_selected(self.selected, blocks=shape.blocks(self.end))
        exact, errors = True, []
        for layer in range(self.cache.layers):
            own = self.scores(layer).clone()
            chosen = self.selected[layer].long()
            exact &= torch.equal(chosen.sort().values, reference.select_blocks(own, shape.topk))
            scores = reference.block_scores(self.index_query[layer], self.pooled(layer))
            exact &= bool(((own.double() - scores).abs() <= SCORE_TOLERANCE * (1.0 + scores)).all())
            truth = reference.sparse_attend(
                self.query[layer], self.cache.keys[layer], self.cache.values[layer], chosen, self.end, shape
            )
            errors.append(relative_error(self.output[layer], truth))
        return exact, worst(errors)


class PrefillBase(ABC):
    """`backend.PrefillChunk` but for its kernels. ValueError for rows beyond the planes or an impossible bucket."""

    def __init__(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int, copies: Copies,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        shape = cache.shape
        if past < 0 or rows < 1 or past + rows > cache.tokens:
            raise ValueError(f"rows {past} to {past + rows - 1} do not lie in planes of {cache.tokens} tokens")
        if mode not in ("in_place", "staged"):
            raise ValueError(f"no mode {mode!r}; there are in_place and staged")
        if copies not in ("serial", "overlapped"):
            raise ValueError(f"no copies {copies!r}; there are serial and overlapped")
        if mode == "staged" and (bucket_tokens < shape.ratio or bucket_tokens % shape.ratio):
            raise ValueError(f"bucket_tokens is {bucket_tokens}, not a positive multiple of {shape.ratio}")
        self.cache, self.layer, self.past, self.rows = cache, layer, past, rows
        self.mode, self.bucket_tokens, self.copies = mode, bucket_tokens, copies
        self.query = torch.empty(rows, shape.query_heads, shape.head_dim, dtype=dtype, device=device)
        self.index_query = torch.empty(rows, shape.index_heads, shape.index_dim, dtype=dtype, device=device)
        self.selection = torch.empty(rows, shape.topk + 1, dtype=torch.int32, device=device)
        self.output = torch.empty_like(self.query)
        self.read_tokens = min(-(-(past + rows) // PAGE_TOKENS) * PAGE_TOKENS, cache.tokens)
        self.link_bytes = 0
        if mode == "staged":
            row_bytes = shape.kv_heads * shape.head_dim * dtype.itemsize
            self.link_bytes = 2 * self.read_tokens * row_bytes

    def refresh(self, seed: int) -> None:
        """Fresh random queries, the selection that they lead to, and a poisoned output."""
        for offset, tensor in enumerate((self.query, self.index_query)):
            source = torch.Generator(tensor.device).manual_seed(2 * seed + offset)
            tensor.copy_(torch.randn(tensor.shape, generator=source, device=tensor.device))
        self.select()
        self.output.fill_(float("nan"))

    @abstractmethod
    def select(self) -> None:
        """Selection of every row into `selection`."""

    @abstractmethod
    def run(self) -> None:
        """Attention of every row into `output`."""

    def _some_rows(self, rows: int) -> list[int]:
        """The first row, the last, and random ones between."""
        drawn = torch.randint(self.rows, (max(0, rows - 2),)).tolist()
        return sorted({0, self.rows - 1, *drawn})

    def _blocks(self, row: int) -> torch.Tensor:
        chosen = self.selection[row].long()
        return chosen[chosen < self.cache.shape.blocks(self.past + row + 1)]

    def verify(self, rows: int = 8) -> float:
        """Worst relative error of the first, the last and random rows against float64, given their selection.

        Raises IndexError if the selection reads what a row must not see.
        """
        shape, keys, values = self.cache.shape, self.cache.keys[self.layer], self.cache.values[self.layer]
        check_rows(self.selection, past=self.past, shape=shape)
        errors = []
        for row in self._some_rows(rows):
            end = self.past + row + 1
            truth = reference.sparse_attend(self.query[row], keys, values, self._blocks(row), end, shape)
            errors.append(relative_error(self.output[row], truth))
        return worst(errors)

    def verify_selection(self, rows: int = 8) -> bool:
        """Some rows hold as many blocks as they should, and no block left out is better than one held.

        Better by more than the rounding of products to the planes' precision, that is.
        """
        shape = self.cache.shape
        check_rows(self.selection, past=self.past, shape=shape)
        for row in self._some_rows(rows):
            blocks = shape.blocks(self.past + row + 1)
            held = self._blocks(row)
            if len(held) != min(shape.topk, blocks):
                return False
            scores = reference.block_scores(self.index_query[row], self.cache.pooled_keys[self.layer][:blocks])
            left = torch.ones(blocks, dtype=torch.bool, device=scores.device)
            left[held] = False
            if len(held) and bool(left.any()):
                rounding = 4 * torch.finfo(self.query.dtype).eps * float(scores.max())
                if float(scores[left].max()) > float(scores[held].min()) + rounding:
                    return False
        return True

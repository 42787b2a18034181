"""What an implementation of the kernels must offer: caches in either tier, a decode step, a prefill chunk, a clock.

Two of them exist: `realkernels/triton_backend.py` on CUDA, and `realkernels/cpu_backend.py` on any computer. On the CPU
the device tier is ordinary memory and the offload tier a file-backed memory map, so that the same layouts, bytes and
gathers exist everywhere. `open_backend` finds the one for a device.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Literal, Protocol

import torch

from realkernels.shape import QsaShape

Tier = Literal["vram", "host"]
Copies = Literal["serial", "overlapped"]
Mode = Literal["in_place", "staged"]
PlaneName = Literal["keys", "values", "raw_keys", "pooled_keys"]


class QsaCache(Protocol):
    """Planes of all layers for one sequence of up to `tokens` tokens."""

    shape: QsaShape
    layers: int
    tokens: int
    dtype: torch.dtype
    device: torch.device
    """Where pooled keys lie and kernels run."""
    tier: Tier
    """Where K, V and raw keys lie; pooled keys always lie on the device."""

    @property
    def keys(self) -> Sequence[torch.Tensor]:
        """One a layer: [tokens, kv_heads, head_dim], addressable by the device."""
        ...

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """As `keys`."""
        ...

    @property
    def raw_keys(self) -> Sequence[torch.Tensor]:
        """[tokens, index_dim]."""
        ...

    @property
    def pooled_keys(self) -> Sequence[torch.Tensor]:
        """[tokens // ratio, index_dim], on the device."""
        ...

    def plane(self, name: PlaneName, layer: int) -> torch.Tensor:
        """The same plane as copies want it: a tensor of the host where it lies there, of the device otherwise."""
        ...

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes of all planes, summed over the tensors themselves; both tiers are always there, one may be 0."""
        ...

    def fill_random(self, seed: int) -> None:
        """Random values in every plane; pooled keys are pooled from the raw ones."""
        ...

    def append(self, layer: int, past: int, keys: torch.Tensor, values: torch.Tensor, raw_keys: torch.Tensor) -> None:
        """Write rows [rows, ...] at `past` and rebuild the pooled keys of every block that they touch and complete.

        ValueError, with nothing written, for rows beyond the planes or of another shape or dtype.
        """
        ...


class DecodeStep(Protocol):
    """One token through selection and sparse attention of every layer, at a fixed end of context."""

    query: torch.Tensor
    """[layers, query_heads, head_dim]; write fresh values before `run`."""
    index_query: torch.Tensor
    """[layers, index_heads, index_dim]."""
    selected: torch.Tensor
    """int32 [layers, topk]: written by selection, read by the gather; order within a row is free."""
    output: torch.Tensor
    """[layers, query_heads, head_dim]."""

    def select(self) -> None:
        """Selection of every layer."""
        ...

    def gather(self) -> None:
        """Sparse attention of every layer over `selected`."""
        ...

    def run(self, *, before_layer: Callable[[int], object] | None = None) -> None:
        """Both, layer by layer, as a model would; `before_layer(layer)` stands in for what a model does in between."""
        ...

    def verify(self) -> tuple[bool, float]:
        """(selection is exactly the reference's, worst relative error of the output against float64), of the last run.

        IndexError where `selected` holds an index out of range, or one twice: kernels trust their indices.
        """
        ...


class PrefillChunk(Protocol):
    """Sparse attention of one layer for `rows` new tokens after `past`, given their selection."""

    query: torch.Tensor
    """[rows, query_heads, head_dim]."""
    index_query: torch.Tensor
    """[rows, index_heads, index_dim]."""
    selection: torch.Tensor
    """int32 [rows, topk + 1]: blocks ascending, the row's open block, then `rows.NO_BLOCK`."""
    output: torch.Tensor
    link_bytes: int
    """Bytes of K and V that one run copies into buckets: the context in whole pages of 256 tokens; 0 in place."""

    def refresh(self, seed: int) -> None:
        """Fresh random queries, the selection that they lead to, and a poisoned output."""
        ...

    def select(self) -> None:
        """Selection of every row (score all pooled keys, keep the best)."""
        ...

    def run(self) -> None:
        """Attention of every row."""
        ...

    def verify(self, rows: int = 8) -> float:
        """Worst relative error of the first, the last and some random rows against float64, given their selection."""
        ...

    def verify_selection(self, rows: int = 8) -> bool:
        """Those rows hold as many blocks as they should, and none left out is better beyond rounding."""
        ...


class Backend(Protocol):
    """One implementation on one device.

    A NaN or infinity in K or V reaches the outputs of the query heads that share its KV head, in rows that selected
    its token; no other head, row or layer, and nothing at all while it is not selected or lies beyond the context. In
    pooled keys a product that is NaN counts as 0 and an infinite one as the best.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    """Of all planes."""
    rounds: int
    """How many times, apart from each other, a thing is timed: once where nobody shares the device."""

    def cache(
        self, shape: QsaShape, *, layers: int, tokens: int, tier: Tier, huge_pages: bool = True
    ) -> AbstractContextManager[QsaCache]:
        """Planes for `layers` layers with undefined contents; everything is released on leaving, on every path.

        RuntimeError in one line where a memory is too small, with what is needed and what is free.
        """
        ...

    def decode_step(self, cache: QsaCache, *, end: int) -> DecodeStep:
        """A step for the token at position `end` - 1, with random queries; `capture` its `run` for one graph on CUDA.

        ValueError beyond the planes, or below `budget` tokens, which are read whole.
        """
        ...

    def prefill_chunk(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int = 0,
        copies: Copies = "overlapped",
    ) -> PrefillChunk:  # fmt: skip
        """A chunk of one layer, refreshed with seed 0; `bucket_tokens` and `copies` only matter when staged."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` made cheap to repeat: a CUDA graph's replay, or `work` itself on the CPU."""
        ...

    def seconds(
        self, work: Callable[[], object], *, repeats: int, warm_up: int = 3,
        before: Callable[[int], object] | None = None,
    ) -> list[float]:  # fmt: skip
        """Seconds of each repeat; `before(i)` prepares repeat i outside the timed part."""
        ...


def open_backend(device: str, *, folder: str | None = None) -> Backend:
    """The implementation for `device` ("cuda", "cuda:0", "cpu"); `folder` is where the CPU's offload tier keeps files.

    Raises RuntimeError in one line where there is no such device: no GPU, torch without CUDA, an old driver, no triton.
    """
    if device == "cpu":
        from realkernels.cpu_backend import CpuBackend  # noqa: PLC0415

        return CpuBackend(folder=folder)
    if find_spec("triton") is None:
        raise RuntimeError(f"triton is not installed, without which there are no kernels for {device}: use device cpu")
    from realkernels.triton_backend import TritonBackend  # noqa: PLC0415

    return TritonBackend(torch.device(device))

"""What an implementation of the kernels must offer: caches in either tier, a decode step, a prefill chunk, a clock.

Two of them exist: `realkernels/triton_backend.py` on CUDA, and `realkernels/cpu_backend.py` on any computer. On the CPU
the device tier is ordinary memory and the offload tier a file-backed memory map, so that the same layouts, bytes and
gathers exist everywhere. `open_backend` finds the one for a device.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from realkernels.shape import QsaShape

Tier = Literal["vram", "host"]
Copies = Literal["serial", "overlapped"]
Mode = Literal["in_place", "staged"]


class QsaCache(Protocol):
    """Planes of all layers for one sequence of up to `tokens` tokens."""

    shape: QsaShape
    tokens: int
    tier: Tier
    """Where K, V and raw keys lie; pooled keys always lie on the device."""
    keys: Sequence[torch.Tensor]
    """One a layer: [tokens, kv_heads, head_dim], addressable by the device."""
    values: Sequence[torch.Tensor]
    raw_keys: Sequence[torch.Tensor]
    """[tokens, index_dim]."""
    pooled_keys: Sequence[torch.Tensor]
    """[tokens // ratio, index_dim], on the device."""

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes of all planes, summed over the tensors themselves."""
        ...

    def fill_random(self, seed: int) -> None:
        """Random values in every plane; pooled keys are pooled from the raw ones."""
        ...

    def append(self, layer: int, past: int, keys: torch.Tensor, values: torch.Tensor, raw_keys: torch.Tensor) -> None:
        """Write rows [rows, ...] at `past` and rebuild the pooled keys of every block that they touch and complete."""
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
        """(selection is exactly the reference's, worst relative error of the output against float64)."""
        ...


class PrefillChunk(Protocol):
    """Sparse attention of one layer for `rows` new tokens after `past`, given their selection."""

    query: torch.Tensor
    """[rows, query_heads, head_dim]."""
    output: torch.Tensor
    link_bytes: int
    """Bytes that one run copies over the link; 0 in place."""

    def refresh(self, seed: int) -> None:
        """Fresh queries and selections, and a poisoned output."""
        ...

    def select(self) -> None:
        """Selection of every row (score all pooled keys, keep the best)."""
        ...

    def run(self) -> None:
        """Attention of every row."""
        ...

    def verify(self, rows: int = 8) -> float:
        """Worst relative error of some random rows against float64."""
        ...


class Backend(Protocol):
    """One implementation on one device."""

    name: str
    device: torch.device
    dtype: torch.dtype
    """Of all planes."""

    def cache(
        self, shape: QsaShape, *, layers: int, tokens: int, tier: Tier, huge_pages: bool = True
    ) -> AbstractContextManager[QsaCache]:
        """Planes for `layers` layers; everything is released on leaving, on every path."""
        ...

    def decode_step(self, cache: QsaCache, *, end: int) -> DecodeStep:
        """A step for the token at position `end` - 1; on CUDA `capture` it for one graph."""
        ...

    def prefill_chunk(
        self, cache: QsaCache, *, layer: int, past: int, rows: int, mode: Mode, bucket_tokens: int = 0,
        copies: Copies = "overlapped",
    ) -> PrefillChunk:  # fmt: skip
        """A chunk of one layer; `bucket_tokens` and `copies` only matter when staged."""
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

    Raises RuntimeError in one line where the device is not there: no GPU, torch without CUDA, a driver too old.
    """
    if device == "cpu":
        from realkernels.cpu_backend import CpuBackend  # noqa: PLC0415

        return CpuBackend(folder=folder)
    from realkernels.triton_backend import TritonBackend  # noqa: PLC0415

    return TritonBackend(torch.device(device))

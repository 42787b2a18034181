"""The one protocol of everything that can be timed: run it, poison it, hold its outputs against float64."""

from abc import ABC, abstractmethod

import torch


class TimedCall(ABC):
    """One operation at one size, with inputs, outputs and caches of its own.

    `run` is what is timed: it launches its kernels and returns, so that it can be captured in a CUDA graph. It covers
    `calls` equal calls (layers, or caches that are taken in turn); `moved_bytes`, `flops` and `link_bytes` are of ONE
    of these, so that seconds of a run over `calls` belong to them.
    """

    output: torch.Tensor
    """What `run` writes; a class with several outputs overrides `finite`."""
    calls: int = 1
    """Layers or caches that one run covers."""
    moved_bytes: float = 0.0
    """Bytes that one call reads and writes where its data lies; 0 where nobody counts them."""
    flops: float = 0.0
    """Operations of one call; masked ones are none."""
    capturable: bool = True
    """Whether a CUDA graph can hold a run; if not, it waits for the device and the host's clock times it."""
    link_bytes: float = 0.0
    """Bytes of one call that cross the link between host and device."""

    @abstractmethod
    def run(self) -> None:
        """All calls, as they are timed."""

    @abstractmethod
    def poison(self) -> None:
        """Fresh inputs and selections, NaN in the outputs. May be called before each repeat, outside the timed part."""

    @abstractmethod
    def error(self) -> float:
        """Relative error of the outputs as they are against float64, of some tokens where there are many.

        0 is exact; infinite for a wrong selection, a wrong copy, or something that is not finite.
        """

    def finite(self) -> bool:
        """Whether all outputs have been written since they were poisoned."""
        return bool(self.output.isfinite().all())

    def verify(self) -> float:
        """Poison, run, and the error that this leaves."""
        self.poison()
        self.run()
        return self.error()


CHECKED_TOKENS = 4
"""Tokens of which a result is checked: the first, the last and some between."""


def some_rows(count: int) -> list[int]:
    """Some of `count` rows, evenly spread: the first and the last among them."""
    return sorted(set(torch.linspace(0, count - 1, min(count, CHECKED_TOKENS)).long().tolist()))


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite where something is NaN."""
    error = float((found.double() - truth).norm() / truth.norm())
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is what is asked for

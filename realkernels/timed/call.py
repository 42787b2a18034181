"""What a timed call is beside its time: inputs that can be renewed, and an output whose error can be told."""

from abc import ABC, abstractmethod

import torch


class TimedCall(ABC):
    """A call that writes `output`; `poison` may come before each repeat.

    `calls` caches are covered by one `run`, one call each; `moved_bytes` and `flops` are those of one call.
    """

    output: torch.Tensor
    calls: int
    moved_bytes: float
    flops: float

    @abstractmethod
    def run(self) -> None:
        """What is timed."""

    @abstractmethod
    def poison(self) -> None:
        """NaN in the output, fresh inputs."""

    @abstractmethod
    def error(self) -> float:
        """Relative error against float64 of the output as it is; infinite where something is not finite."""

    def finite(self) -> bool:
        """Whether the output has been written."""
        return bool(self.output.isfinite().all())

    def verify(self) -> float:
        """Run on fresh inputs; the error against float64."""
        self.poison()
        self.run()
        return self.error()

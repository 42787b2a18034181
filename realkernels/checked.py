"""What a timed call has beside its time: an output that can be poisoned, and its error against float64."""

from abc import ABC, abstractmethod

import torch


class Checked(ABC):
    """A call that writes `output`."""

    output: torch.Tensor

    @abstractmethod
    def run(self) -> None:
        """The call, as it is timed."""

    @abstractmethod
    def poison(self) -> None:
        """NaN in the output, fresh inputs."""

    @abstractmethod
    def error(self) -> float:
        """Relative error of the output as it is; infinite where something is not finite."""

    def finite(self) -> bool:
        """Whether the output has been written."""
        return bool(self.output.isfinite().all())

    def verify(self) -> float:
        """Run on fresh inputs; the error against float64."""
        self.poison()
        self.run()
        return self.error()

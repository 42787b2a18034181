"""Matrix products by torch as timed calls, each with a matrix of its own: what a device's tensor roof is made of."""

import torch

from realkernels.timed.call import TimedCall, relative_error, some_rows

LEAST_MATRICES = 2


class Product(TimedCall):
    """`tokens` tokens times matrices [rows, columns] in turn, which together are `beyond_bytes`, beyond any cache."""

    def __init__(
        self, *, tokens: int, rows: int, columns: int, dtype: torch.dtype, beyond_bytes: int, device: torch.device
    ) -> None:
        self.moved_bytes, self.flops = float(rows * columns * dtype.itemsize), 2.0 * tokens * rows * columns
        self.calls = max(LEAST_MATRICES, round(beyond_bytes / self.moved_bytes))
        self.matrices = [
            torch.randn(rows, columns, device=device).mul_(columns**-0.5).to(dtype) for _ in range(self.calls)
        ]
        self.inputs = torch.randn(tokens, columns, device=device).to(dtype)
        self.output = torch.empty(tokens, rows, dtype=dtype, device=device)

    def run(self) -> None:
        """One product a matrix."""
        for matrix in self.matrices:
            if self.inputs.shape[0] == 1:
                torch.mv(matrix, self.inputs[0], out=self.output[0])
            else:
                torch.mm(self.inputs, matrix.T, out=self.output)

    def poison(self) -> None:
        """Fresh inputs, NaN in the output."""
        self.inputs.normal_()
        self.output.fill_(float("nan"))

    def error(self) -> float:
        """Of some tokens; infinite where something is not finite."""
        some = some_rows(self.inputs.shape[0])
        truth = self.inputs[some].double() @ self.matrices[-1].double().T
        return relative_error(self.output[some], truth) if self.finite() else float("inf")

"""Library kernels of a dense layer: matrix products through torch, attention through torch's flash attention.

What serving engines run for weights that are not quantised: cuBLAS, and flash attention over K and V that lie as
[sequence, token, head, dim]. Nothing falls back: where flash attention cannot run, `flash_missing` says why.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from realkernels import reference
from realkernels.shape import DenseShape

CHECKED_TOKENS = 4
"""Tokens of which a result is checked: the first, the last and some between."""

CHECKED_COLUMNS = 256
"""Columns of a product that are checked, spread evenly."""


class LayerWeights(NamedTuple):
    """Matrices [out, in] and norms of one layer."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_in: torch.Tensor
    norm_mid: torch.Tensor


def random_weights(shape: DenseShape, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    """Weights that keep the variance of what they multiply."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(std=columns**-0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(shape.hidden, dtype=dtype, device=device)

    return LayerWeights(
        qkv=matrix(shape.qkv_width, shape.hidden),
        output=matrix(shape.hidden, shape.query_width),
        gate_up=matrix(2 * shape.intermediate, shape.hidden),
        down=matrix(shape.hidden, shape.intermediate),
        norm_in=norm(),
        norm_mid=norm(),
    )


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What the kernels of a layer hand on, each [tokens, width]; all layers share them."""

    residual: torch.Tensor
    branch: torch.Tensor
    """Result of attention or feed-forward, before it is added to the residual."""
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor

    @classmethod
    def allocate(cls, shape: DenseShape, tokens: int, dtype: torch.dtype, device: torch.device) -> "Activations":
        """With random values."""
        widths = {
            "residual": shape.hidden, "branch": shape.hidden, "normed": shape.hidden, "qkv": shape.qkv_width,
            "attended": shape.query_width, "gate_up": 2 * shape.intermediate, "gated": shape.intermediate,
        }  # fmt: skip
        return cls(**{name: torch.randn(tokens, width, dtype=dtype, device=device) for name, width in widths.items()})

    @property
    def tokens(self) -> int:
        """Rows of each."""
        return self.residual.shape[0]

    def renew(self) -> None:
        """Fresh random values."""
        for part in vars(self).values():
            part.normal_()


def check_rows_of(tokens: int, device: torch.device) -> torch.Tensor:
    """Some rows of `tokens`, the first and the last among them."""
    return torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS), device=device).long().unique()


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the whole; infinite where something is NaN, which compares with nothing."""
    error = float((found.double() - truth).norm() / truth.norm())
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is what is asked for


def product(inputs: torch.Tensor, matrix: torch.Tensor, outputs: torch.Tensor) -> None:
    """Rows of `inputs` times the transposed `matrix` [out, in]."""
    torch.mm(inputs, matrix.T, out=outputs)


class LibraryProducts:
    """The four products of several layers one after the other, each layer with weights of its own."""

    def __init__(
        self, shape: DenseShape, *, tokens: int, weights: Sequence[LayerWeights], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.weights = weights
        self.activations = Activations.allocate(shape, tokens, dtype, device)

    def _steps(self, layer: LayerWeights) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        at = self.activations
        return [
            (at.normed, layer.qkv, at.qkv),
            (at.attended, layer.output, at.branch),
            (at.normed, layer.gate_up, at.gate_up),
            (at.gated, layer.down, at.branch),
        ]

    def run(self) -> None:
        """Every layer."""
        for layer in self.weights:
            for inputs, matrix, outputs in self._steps(layer):
                product(inputs, matrix, outputs)

    def poison(self) -> None:
        """NaN where results go, fresh numbers where they come from."""
        self.activations.renew()
        for outputs in (self.activations.qkv, self.activations.branch, self.activations.gate_up):
            outputs.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether every result has been written."""
        at = self.activations
        return all(bool(part.isfinite().all()) for part in (at.qkv, at.branch, at.gate_up))

    def verify(self) -> float:
        """Run the last layer on fresh numbers; worst relative error of some rows and columns against float64."""
        worst = 0.0
        for inputs, matrix, outputs in self._steps(self.weights[-1]):
            self.poison()
            product(inputs, matrix, outputs)
            rows = check_rows_of(inputs.shape[0], inputs.device)
            columns = slice(None, None, max(1, matrix.shape[0] // CHECKED_COLUMNS))
            truth = inputs[rows].double() @ matrix[columns].double().T
            worst = max(worst, relative_error(outputs[rows][:, columns], truth))
            worst = max(worst, 0.0 if bool(outputs.isfinite().all()) else float("inf"))
        return worst


# Attention


def has_lower_right(device: torch.device) -> bool:
    """Whether flash attention masks the future of rows that follow a past; the CPU's does so without a past only."""
    return device.type == "cuda"


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Grouped-query attention by flash attention and nothing else, each [batch, tokens, heads, dim].

    `causal` lines up the last row with the last key. RuntimeError where flash attention does not take this.
    """
    rows, read = query.shape[1], keys.shape[1]
    heads_first = [part.transpose(1, 2) for part in (query, keys, values)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if causal and rows not in (1, read):
            made = scaled_dot_product_attention(*heads_first, attn_mask=causal_lower_right(rows, read), enable_gqa=True)
        else:
            made = scaled_dot_product_attention(*heads_first, is_causal=causal and rows == read, enable_gqa=True)
    return made.transpose(1, 2)


def flash_missing(shape: DenseShape, *, dtype: torch.dtype, device: torch.device) -> str:
    """Empty, or in one line why flash attention cannot run here."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch's reasons come as warnings
        try:
            for rows in (1, 16):
                query = torch.randn(1, rows, shape.query_heads, shape.head_dim, dtype=dtype, device=device)
                keys = torch.randn(1, 48, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
                flash(query, keys, keys, causal=has_lower_right(device))
        except (RuntimeError, TypeError) as refused:  # TypeError: a torch without enable_gqa
            reasons = [str(each.message) for each in said]
            words = next((words for words in reasons if "lash" in words), str(refused))
            return f"no flash attention here: {words.splitlines()[0].partition(' (Triggered')[0]}"
    return ""


class LibraryAttention:
    """Flash attention of `rows` new tokens a sequence over `past` cached ones, over several caches in turn."""

    def __init__(
        self, shape: DenseShape, *, batch: int, rows: int, past: int, caches: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.batch, self.rows, self.past = shape, batch, rows, past
        self.causal = rows > 1 and (past == 0 or has_lower_right(device))
        self.query = torch.randn(batch, rows, shape.query_heads, shape.head_dim, dtype=dtype, device=device)
        size = (2, batch, past + rows, shape.kv_heads, shape.head_dim)
        self.caches = [torch.randn(size, dtype=dtype, device=device) for _ in range(caches)]
        self.output = torch.empty_like(self.query)

    @property
    def cache_bytes(self) -> int:
        """K and V that one call reads."""
        return self.caches[0].numel() * self.caches[0].element_size()

    @property
    def flops(self) -> float:
        """Operations of one call, exactly: the masked ones are none, where it masks."""
        return self.shape.attend_flops(
            batch=self.batch, rows=self.rows, past=self.past, causal=self.causal or self.rows == 1
        )

    def run(self) -> None:
        """One call a cache."""
        for keys, values in self.caches:
            self.output = flash(self.query, keys, values, causal=self.causal)

    def poison(self) -> None:
        """NaN in the output, fresh queries."""
        self.query.normal_()
        self.output.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether the output has been written."""
        return bool(self.output.isfinite().all())

    def verify(self) -> float:
        """Run on fresh queries; worst relative error of some rows of the outermost heads against float64."""
        self.poison()
        self.run()
        if not self.finite():
            return float("inf")
        group = self.shape.query_heads // self.shape.kv_heads
        keys, values = self.caches[-1]
        worst = 0.0
        for sequence, kv_head in ((0, 0), (self.batch - 1, self.shape.kv_heads - 1)):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for row in check_rows_of(self.rows, torch.device("cpu")).tolist():
                seen = self.past + row + 1 if self.causal else self.past + self.rows
                truth = reference.attend(
                    self.query[sequence, row, heads],
                    keys[sequence, :seen, kv_head : kv_head + 1],
                    values[sequence, :seen, kv_head : kv_head + 1],
                )
                worst = max(worst, relative_error(self.output[sequence, row, heads], truth))
        return worst

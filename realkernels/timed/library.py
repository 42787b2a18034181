"""Library kernels of a dense layer as timed calls: products, what lies between, appending, attention, sampling, layers.

What serving engines run for weights that are not quantised: cuBLAS, flash attention over K and V that lie as [sequence,
token, head, dim], and between them fused kernels (`kernels/dense.py`), in plain torch on the CPU. Nothing falls back:
where flash attention cannot run, `flash_missing` says why.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention, silu

from realkernels import reference
from realkernels.kernels import dense, in_torch
from realkernels.shape import DenseShape
from realkernels.timed.call import TimedCall, relative_error, some_rows

CHECKED_COLUMNS = 256
"""Columns of a product that are checked, spread evenly."""

WIDENED_ROWS = 1024
"""Rows of a matrix that are widened to float64 at once."""

EPSILON = 1e-5
ROPE_BASE = 500_000.0
TEMPERATURE = 0.8


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

    return LayerWeights(
        qkv=matrix(shape.qkv_width, shape.hidden),
        output=matrix(shape.hidden, shape.query_width),
        gate_up=matrix(2 * shape.intermediate, shape.hidden),
        down=matrix(shape.hidden, shape.intermediate),
        norm_in=_random_norm(shape, dtype, device),
        norm_mid=_random_norm(shape, dtype, device),
    )


def _random_norm(shape: DenseShape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(shape.hidden, dtype=dtype, device=device)


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

    def renew(self, *poisoned: str) -> None:
        """Fresh random values, NaN in these."""
        for name, part in vars(self).items():
            if name in poisoned:
                part.fill_(float("nan"))
            else:
                part.normal_()


def _all_finite(*parts: torch.Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


def product(inputs: torch.Tensor, matrix: torch.Tensor, outputs: torch.Tensor) -> None:
    """Rows of `inputs` times the transposed `matrix` [out, in]."""
    torch.mm(inputs, matrix.T, out=outputs)


class Linear(TimedCall):
    """The four products of several layers one after the other, each layer with weights of its own."""

    def __init__(
        self, shape: DenseShape, *, tokens: int, weights: Sequence[LayerWeights], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.weights, self.calls = weights, len(weights)
        self.moved_bytes = shape.parameters * dtype.itemsize
        self.flops = 2.0 * shape.parameters * tokens
        self.activations = Activations.allocate(shape, tokens, dtype, device)

    def _products(self, layer: LayerWeights) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        at = self.activations
        return [
            (at.normed, layer.qkv, at.qkv),
            (at.attended, layer.output, at.residual),
            (at.normed, layer.gate_up, at.gate_up),
            (at.gated, layer.down, at.branch),
        ]

    def run(self) -> None:
        """Every layer."""
        for layer in self.weights:
            for inputs, matrix, outputs in self._products(layer):
                product(inputs, matrix, outputs)

    def poison(self) -> None:
        """NaN where results go, fresh numbers where they come from."""
        self.activations.renew("qkv", "residual", "gate_up", "branch")

    def finite(self) -> bool:
        """Whether every result has been written."""
        return _all_finite(*(outputs for _, _, outputs in self._products(self.weights[-1])))

    def error(self) -> float:
        """Of some rows and columns of the last layer's products."""
        if not self.finite():
            return float("inf")
        worst = 0.0
        for inputs, matrix, outputs in self._products(self.weights[-1]):
            rows = some_rows(inputs.shape[0])
            columns = slice(None, None, max(1, matrix.shape[0] // CHECKED_COLUMNS))
            truth = inputs[rows].double() @ matrix[columns].double().T
            worst = max(worst, relative_error(outputs[rows][:, columns], truth))
        return worst


# What lies between the products


def elementwise_ops(device: torch.device) -> Any:
    """The module with the kernels `add_norm`, `rotate`, `append` and `gate` for a device."""
    return dense if device.type == "cuda" else in_torch


def _angles(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """float64 [positions, head_dim / 2], by which the halves of a head are rotated."""
    frequencies = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    return positions.double()[:, None] * frequencies


def _rotation_table(positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines, then sines."""
    angles = _angles(torch.arange(positions), head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


def _norm_truth(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of [tokens, hidden] in float64."""
    scale = (total.double().square().mean(dim=1, keepdim=True) + EPSILON).rsqrt()
    return total.double() * scale * weight.double()


def _rotated_truth(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] rotated by their positions, in float64."""
    angles = _angles(positions, heads.shape[2])[:, None, :]
    low, high = heads.double().chunk(2, dim=2)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=2)


def _gated_truth(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) x second half of [tokens, 2 x width], in float64."""
    first, second = gate_up.double().chunk(2, dim=1)
    return silu(first) * second


class Elementwise(TimedCall):
    """All of it but the write to the cache, of several layers one after the other, on one set of activations."""

    def __init__(
        self, shape: DenseShape, *, tokens: int, layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.calls = shape, layers
        self.moved_bytes = shape.elementwise * tokens * dtype.itemsize
        self.ops = elementwise_ops(device)
        self.activations = Activations.allocate(shape, tokens, dtype, device)
        self.norms = [[_random_norm(shape, dtype, device) for _ in range(2)] for _ in range(layers)]
        self.positions = torch.arange(tokens, device=device)
        self.table = _rotation_table(tokens, shape.head_dim, device)
        self._before = dict[str, torch.Tensor]()

    def run(self) -> None:
        """Every layer, in a layer's order, as if its products lay between."""
        at, heads = self.activations, self.shape.query_heads + self.shape.kv_heads
        for norm_in, norm_mid in self.norms:
            self.ops.add_norm(at.branch, at.residual, norm_in, at.normed, EPSILON)
            self.ops.rotate(at.qkv, self.positions, self.table, heads)
            self.ops.add_norm(at.branch, at.residual, norm_mid, at.normed, EPSILON)
            self.ops.gate(at.gate_up, at.gated)

    def poison(self) -> None:
        """NaN where results go, fresh numbers where they come from; some tokens of these are remembered."""
        self.activations.renew("normed", "gated")
        rows = some_rows(self.positions.numel())
        names = ("branch", "residual", "qkv", "gate_up")
        self._before = {name: getattr(self.activations, name)[rows].clone() for name in names}

    def finite(self) -> bool:
        """Whether every result has been written."""
        at = self.activations
        return _all_finite(at.normed, at.gated, at.residual, at.qkv)

    def error(self) -> float:
        """Of some tokens after one run since they were poisoned: layers add up, and rotate further."""
        at, shape, before = self.activations, self.shape, self._before
        rows = some_rows(self.positions.numel())
        rotating = (shape.query_heads + shape.kv_heads) * shape.head_dim
        total = before["residual"].double() + 2 * self.calls * before["branch"].double()
        heads = before["qkv"][:, :rotating].unflatten(1, (-1, shape.head_dim))
        rotated = _rotated_truth(heads, self.positions[rows] * self.calls).flatten(1)
        kept = before["qkv"][:, rotating:].double()
        return max(
            relative_error(at.residual[rows], total),
            relative_error(at.normed[rows], _norm_truth(total, self.norms[-1][1])),
            relative_error(at.qkv[rows], torch.cat([rotated, kept], dim=1)),
            relative_error(at.gated[rows], _gated_truth(before["gate_up"])),
        )


class PlainAppend(TimedCall):
    """K and V of new tokens copied to the planes of several layers, each token to a slot of its own."""

    def __init__(
        self, shape: DenseShape, *, tokens: int, layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.calls, self.moved_bytes = layers, shape.appended * tokens * dtype.itemsize
        self.ops = elementwise_ops(device)
        self.qkv = torch.randn(tokens, shape.qkv_width, dtype=dtype, device=device)
        self.slots = torch.randperm(tokens, device=device)
        size = (tokens, shape.kv_heads, shape.head_dim)
        self.planes = [torch.empty(2, *size, dtype=dtype, device=device) for _ in range(layers)]

    def run(self) -> None:
        """Every layer."""
        for keys, values in self.planes:
            self.ops.append(self.qkv, self.slots, keys, values)

    def poison(self) -> None:
        """NaN in every plane, fresh keys and values."""
        self.qkv.normal_()
        for plane in self.planes:
            plane.fill_(float("nan"))

    def finite(self) -> bool:
        """Whether every slot has been written."""
        return _all_finite(*self.planes)

    def error(self) -> float:
        """0 or infinite: a copy is exact."""
        width = self.planes[0].shape[2] * self.planes[0].shape[3]
        wanted = self.qkv[:, -2 * width :].unflatten(1, (2, width)).transpose(0, 1)
        right = all(torch.equal(plane.flatten(2)[:, self.slots], wanted) for plane in self.planes)
        return 0.0 if right else float("inf")


# Attention


def has_lower_right(device: torch.device) -> bool:
    """Whether flash attention masks the future of tokens that follow a past; the CPU's does so without a past only."""
    return device.type == "cuda"


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Grouped-query attention by flash attention and nothing else, each [batch, tokens, heads, dim].

    `causal` lines up the last query with the last key. RuntimeError where flash attention does not take this.
    """
    q_tokens, read = query.shape[1], keys.shape[1]
    heads_first = [part.transpose(1, 2) for part in (query, keys, values)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if causal and q_tokens not in (1, read):
            mask = causal_lower_right(q_tokens, read)
            made = scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        else:
            made = scaled_dot_product_attention(*heads_first, is_causal=causal and q_tokens == read, enable_gqa=True)
    return made.transpose(1, 2)


def flash_missing(shape: DenseShape, *, dtype: torch.dtype, device: torch.device) -> str:
    """Empty, or in one line why flash attention cannot run here."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch's reasons come as warnings
        try:
            for q_tokens in (1, 16):
                query = torch.randn(1, q_tokens, shape.query_heads, shape.head_dim, dtype=dtype, device=device)
                keys = torch.randn(1, 48, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
                flash(query, keys, keys, causal=has_lower_right(device))
        except (RuntimeError, TypeError) as refused:  # TypeError: a torch without enable_gqa
            reasons = [str(each.message) for each in said]
            words = next((words for words in reasons if "lash" in words), str(refused))
            return f"no flash attention here: {words.splitlines()[0].partition(' (Triggered')[0]}"
    return ""


class FlashAttention(TimedCall):
    """`q_tokens` new tokens a sequence over `past_tokens` cached ones and themselves, over several caches in turn."""

    def __init__(
        self, shape: DenseShape, *, batch: int, q_tokens: int, past_tokens: int, caches: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.batch, self.q_tokens, self.past_tokens = shape, batch, q_tokens, past_tokens
        self.causal = q_tokens > 1 and (past_tokens == 0 or has_lower_right(device))
        self.query = torch.randn(batch, q_tokens, shape.query_heads, shape.head_dim, dtype=dtype, device=device)
        size = (2, batch, past_tokens + q_tokens, shape.kv_heads, shape.head_dim)
        self.caches = [torch.randn(size, dtype=dtype, device=device) for _ in range(caches)]
        self.output = torch.empty_like(self.query)
        self.calls, self.moved_bytes = caches, self.caches[0].nbytes
        masks = self.causal or q_tokens == 1
        self.flops = shape.attend_flops(batch=batch, q_tokens=q_tokens, past_tokens=past_tokens, causal=masks)

    def run(self) -> None:
        """One call a cache."""
        for keys, values in self.caches:
            self.output = flash(self.query, keys, values, causal=self.causal)

    def poison(self) -> None:
        """NaN in the output, fresh queries."""
        self.query.normal_()
        self.output.fill_(float("nan"))

    def error(self) -> float:
        """Of some tokens of the outermost heads of the last cache."""
        if not self.finite():
            return float("inf")
        keys, values = self.caches[-1]
        group, worst = self.shape.query_heads // self.shape.kv_heads, 0.0
        for sequence, kv_head in ((0, 0), (self.batch - 1, self.shape.kv_heads - 1)):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            own = slice(kv_head, kv_head + 1)
            for token in some_rows(self.q_tokens):
                seen = self.past_tokens + (token + 1 if self.causal else self.q_tokens)
                read = (keys[sequence, :seen, own], values[sequence, :seen, own])
                truth = reference.attend(self.query[sequence, token, heads], *read)
                worst = max(worst, relative_error(self.output[sequence, token, heads], truth))
        return worst


class Sampling(TimedCall):
    """One token from each row of fp32 logits, as a serving engine draws it: softmax, exponential noise, the largest.

    The draw is the argmax of share over noise, which needs no sum twice.
    """

    def __init__(self, *, tokens: int, vocab: int, device: torch.device) -> None:
        self.logits = torch.randn(tokens, vocab, device=device)
        self.noise = torch.empty_like(self.logits)
        self.output = torch.empty(tokens, dtype=torch.long, device=device)
        self.moved_bytes = self.logits.nbytes

    def run(self) -> None:
        """Scale, softmax, noise, argmax."""
        shares = torch.softmax(self.logits / TEMPERATURE, dim=1)
        self.noise.exponential_()
        torch.argmax(shares.div_(self.noise), dim=1, out=self.output)

    def poison(self) -> None:
        """Fresh logits, tokens that no vocabulary has."""
        self.logits.normal_()
        self.output.fill_(-1)

    def finite(self) -> bool:
        """Whether every row has a token."""
        return bool((self.output >= 0).all())

    def error(self) -> float:
        """Largest relative shortfall of a drawn token's weight, in float64, from the row's largest."""
        if not self.finite():
            return float("inf")
        weights = torch.softmax(self.logits.double() / TEMPERATURE, dim=1) / self.noise.double()
        drawn = weights.gather(1, self.output[:, None])[:, 0]
        return float((1 - drawn / weights.amax(dim=1)).max())


class DenseLayers(TimedCall):
    """Whole layers, chained as a model chains them: `q_tokens` new tokens of each of `batch` sequences.

    ValueError for a chunk behind a past where flash attention cannot mask it.
    """

    def __init__(
        self, shape: DenseShape, *, layers: int, batch: int, q_tokens: int, past_tokens: int, dtype: torch.dtype,
        device: torch.device, reduce: Callable[[torch.Tensor], object] | None = None,
    ) -> None:  # fmt: skip
        """`reduce` is handed each branch, of attention and of feed-forward: where ranks share a layer, to sum it."""
        if past_tokens and q_tokens > 1 and not has_lower_right(device):
            raise ValueError(
                f"no chunk of {q_tokens} rows after {past_tokens} tokens here: flash attention cannot mask it"
            )
        self.shape, self.batch, self.q_tokens, self.past_tokens = shape, batch, q_tokens, past_tokens
        self.calls, self.ops, self.reduce = layers, elementwise_ops(device), reduce
        self.weights = [random_weights(shape, dtype, device) for _ in range(layers)]
        self.activations = Activations.allocate(shape, batch * q_tokens, dtype, device)
        seen = past_tokens + q_tokens
        size = (2, batch, seen, shape.kv_heads, shape.head_dim)
        self.caches = [torch.randn(size, dtype=dtype, device=device) for _ in range(layers)]
        self.table = _rotation_table(seen, shape.head_dim, device)
        self.positions = torch.arange(past_tokens, seen, device=device).repeat(batch)
        self.slots = torch.arange(batch, device=device).repeat_interleave(q_tokens) * seen + self.positions
        self._rows = some_rows(batch * q_tokens)

    def run(self) -> None:
        """Every layer, from the branch before it to its own."""
        at, ops, shape = self.activations, self.ops, self.shape
        for weights, (keys, values) in zip(self.weights, self.caches, strict=True):
            ops.add_norm(at.branch, at.residual, weights.norm_in, at.normed, EPSILON)
            product(at.normed, weights.qkv, at.qkv)
            ops.rotate(at.qkv, self.positions, self.table, shape.query_heads + shape.kv_heads)
            ops.append(at.qkv, self.slots, keys, values)
            queries = at.qkv.view(self.batch, self.q_tokens, -1)[..., : shape.query_width]
            heads = queries.unflatten(2, (shape.query_heads, shape.head_dim))
            attended = flash(heads, keys, values, causal=self.q_tokens > 1)
            product(attended.reshape(self.slots.numel(), -1), weights.output, at.branch)
            if self.reduce is not None:
                self.reduce(at.branch)
            ops.add_norm(at.branch, at.residual, weights.norm_mid, at.normed, EPSILON)
            product(at.normed, weights.gate_up, at.gate_up)
            ops.gate(at.gate_up, at.gated)
            product(at.gated, weights.down, at.branch)
            if self.reduce is not None:
                self.reduce(at.branch)

    def poison(self) -> None:
        """NaN where results go, fresh numbers where they come from; some tokens of these are remembered."""
        at = self.activations
        at.renew("normed", "qkv", "attended", "gate_up", "gated")
        for cache in self.caches:
            cache[:, :, self.past_tokens :] = float("nan")
        self._before = at.branch[self._rows].double() + at.residual[self._rows].double()

    def finite(self) -> bool:
        """Whether results and slots have been written."""
        return _all_finite(self.activations.branch, *(cache[:, :, self.past_tokens :] for cache in self.caches))

    def error(self) -> float:
        """Of some tokens' branches after one run since they were poisoned; infinite where keys were misplaced."""
        total, branch = self._before, self._before
        for weights, cache in zip(self.weights, self.caches, strict=True):
            total, branch = self._layer_truth(total, weights, cache)
        return relative_error(self.activations.branch[self._rows], branch)

    def _layer_truth(
        self, total: torch.Tensor, weights: LayerWeights, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer in float64, from the sum of branch and residual on -> this sum behind it, and its branch.

        Attention reads the cache as it is; what its own keys and values must be is checked.
        """
        shape, rows = self.shape, self._rows
        made = _wide(_norm_truth(total, weights.norm_in), weights.qkv).unflatten(1, (-1, shape.head_dim))
        rotating = shape.query_heads + shape.kv_heads
        rotated = _rotated_truth(made[:, :rotating], self.positions[rows])
        own = torch.stack([rotated[:, shape.query_heads :], made[:, rotating:]])
        if relative_error(cache.flatten(1, 2)[:, self.slots[rows]], own) > 0.1:  # misplaced, not misrounded
            return torch.full_like(total, float("nan")), torch.full_like(total, float("nan"))
        attended = []
        for index, token in enumerate(rows):
            sequence, row = divmod(token, self.q_tokens)
            keys, values = cache[:, sequence, : self.past_tokens + row + 1]
            attended.append(reference.attend(rotated[index, : shape.query_heads], keys, values))
        total = total + _wide(torch.stack(attended).flatten(1), weights.output)
        branch = _wide(_gated_truth(_wide(_norm_truth(total, weights.norm_mid), weights.gate_up)), weights.down)
        return total + branch, branch


def _wide(inputs: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """A product in float64, some rows of the matrix at a time."""
    return torch.cat([inputs @ part.double().T for part in matrix.split(WIDENED_ROWS)], dim=1)

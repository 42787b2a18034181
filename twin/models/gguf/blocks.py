"""The tensors of one layer, by kind: `blk.3.attn_q.weight` is the matrix `attn_q` of layer 3.

Kinds are those of `src/llama-arch.cpp` of github.com/ggml-org/llama.cpp, dimensions those of its `src/models/`. Biases,
scales, norms and everything else that has one axis are vectors; experts that lie in tensors of their own
(`ffn_up.0`, `ffn_up.1`, ...) are read as if they lay in one.
"""

import re
from collections.abc import Iterable

from twin.errors import BadFile
from twin.models.fields import BY_HAND, Fields
from twin.models.gguf.header import Tensor

_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
_SUFFIX = re.compile(r"(.+?)(?:\.(weight|bias|scale|input_scale))?")
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.\d+")


CORRECTIONS = ("exp_probs", "exp_probs_b", "layer_output_scale")
"""Kinds of tensors that are set and not learned: no parameters, though they have bytes."""


class Block:
    """Matrices and elements of vectors of layer `index` that no mixer and no feed-forward has taken yet."""

    def __init__(self, where: str, index: int) -> None:
        self.where, self.index = where, index
        self.matrices: dict[str, Tensor] = {}
        self.vectors: dict[str, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor by its name within the layer."""
        kind, single = kind_of(name)
        if kind in CORRECTIONS:
            return
        if is_vector(name, tensor):
            self.vectors[kind] = self.vectors.get(kind, 0) + tensor.elements
        elif single and kind in self.matrices:
            *dims, count = self.matrices[kind].dims
            if tuple(dims) != tensor.dims:
                raise self.wrong(f"{name}: {list(tensor.dims)} beside experts of {dims}")
            self.matrices[kind] = tensor._replace(dims=(*dims, count + 1))
        else:
            self.matrices[kind] = tensor._replace(dims=(*tensor.dims, 1)) if single else tensor

    def __contains__(self, kind: str) -> bool:
        """Whether the layer has a matrix of the kind."""
        return kind in self.matrices

    def take(self, *kinds: str) -> dict[str, Tensor]:
        """Those of the matrices that are there."""
        return {kind: self.matrices.pop(kind) for kind in kinds if kind in self.matrices}

    def take_vectors(self, *begins: str) -> int:
        """Elements of the vectors whose kinds begin so."""
        kinds = [kind for kind in self.vectors if kind.startswith(begins)]
        return sum(self.vectors.pop(kind) for kind in kinds)

    def rows(self, kind: str) -> int:
        """Elements that the product with a matrix yields."""
        dims = self.matrices[kind].dims
        return dims[1] if len(dims) > 1 else 1

    def wrong(self, why: str) -> BadFile:
        """What to raise about the layer."""
        return BadFile(f"{self.where}: blk.{self.index}.{why}", hint=BY_HAND)

    def rest(self, taken: dict[str, Tensor], implied: int) -> int:
        """Elements of the matrices beyond those that the shape implies. Raises BadFile where they are fewer."""
        held = sum(tensor.elements for tensor in taken.values())
        if held < implied:
            names = ", ".join(sorted(taken))
            raise self.wrong(f"* ({names}) have {held:,} elements, fewer than the {implied:,} that their shape implies")
        return held - implied

    def per_layer(self, fields: Fields, key: str, *, default: int | None = None, low: int = 1) -> int:
        """A key that holds one number for all layers, or a list with one for each."""
        if not isinstance(fields.raw.get(key), list):
            return fields.integer(key, default=default, low=low)
        numbers = fields.integers(key)
        if self.index >= len(numbers):
            raise fields.wrong(key, f"has {len(numbers)} numbers, none for layer {self.index}")
        if numbers[self.index] < low:
            raise fields.wrong(key, f"is {numbers[self.index]} for layer {self.index}, less than {low}")
        return numbers[self.index]


def in_layer(name: str) -> tuple[int, str] | None:
    """Number of the layer and name within it of a tensor; None: it lies in none."""
    found = _IN_LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def kind_of(name: str) -> tuple[str, bool]:
    """The kind of a tensor by its name, and whether it is of one expert alone."""
    found = _SUFFIX.fullmatch(name)
    kind = found[1] if found else name
    single = _ONE_EXPERT.fullmatch(kind)
    return (f"{single[1]}_exps", True) if single else (kind, False)


def is_vector(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a norm, a bias, a scale or another one of one axis."""
    flat = sum(size > 1 for size in tensor.dims) <= 1
    return flat or "norm" in name or name.endswith((".bias", ".scale", ".input_scale"))


def blocks_of(where: str, tensors: Iterable[tuple[int, str, Tensor]], layers: int) -> list[Block]:
    """All layers. Raises BadFile for one without tensors."""
    blocks = [Block(where, index) for index in range(layers)]
    for index, name, tensor in tensors:
        blocks[index].add(name, tensor)
    empty = next((block.index for block in blocks if not (block.matrices or block.vectors)), None)
    if empty is not None:
        raise BadFile(f"{where}: no tensor of layer {empty} (blk.{empty}.*) of {layers} layers")
    return blocks

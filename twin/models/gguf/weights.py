"""How many elements and bytes of which types the parts of a model have in a GGUF."""

from collections import Counter

from twin.models.ggml import BITS
from twin.models.gguf.blocks import is_vector, kind_of
from twin.models.gguf.feeding import BESIDE, EXPERTS, ROUTER
from twin.models.gguf.header import Tensor
from twin.models.spec import ModelSpec, Part, Stored, Weights

_LAYERS: tuple[Part, ...] = ("attention", "feed_forward", "experts")


def part_in_layer(name: str, tensor: Tensor) -> Part:
    """The part that a tensor of a layer belongs to, by its name within the layer."""
    kind, _ = kind_of(name)
    if is_vector(name, tensor):
        return "vectors"
    if kind in EXPERTS:
        return "experts"
    if kind == ROUTER:
        return "router"
    return "feed_forward" if kind in BESIDE or kind.startswith("ffn_") else "attention"


class Tally:
    """Elements by part, and bytes by part and type."""

    def __init__(self) -> None:
        self.elements: Counter[Part] = Counter()
        self.types: dict[Part, Counter[str]] = {}

    def add(self, part: Part, tensor: Tensor, *, learned: bool = True) -> None:
        """One more tensor; of what is not learned the bytes alone."""
        self.elements[part] += tensor.elements if learned else 0
        self.types.setdefault(part, Counter())[tensor.type.name] += tensor.size_bytes

    def weights(self) -> Weights:
        """The format is the type of most of the layers' bytes; a part of which most bytes are of another says so."""
        layers = sum((self.types[part] for part in _LAYERS if part in self.types), Counter[str]())
        main = _most(layers or sum(self.types.values(), Counter[str]()))
        parts: dict[Part, Stored] = {part: _most(types) for part, types in self.types.items()}
        return Weights(
            format=main.format,
            bits=main.bits,
            parts={part: stored for part, stored in parts.items() if stored != main or part == "vectors"},
            part_bytes={part: types.total() for part, types in self.types.items()},
        )

    def difference(self, spec: ModelSpec) -> str:
        """What the tensors have otherwise than the shape; empty where they agree."""
        for part in {**self.elements, **spec.parameters}:
            implied, held = spec.parameters.get(part, 0), self.elements[part]
            if implied != held:
                return (
                    f"tensors of the {part.replace('_', ' ')} have {held:,} elements, the shape implies {implied:,.0f}"
                )
        return ""


def _most(types: Counter[str]) -> Stored:
    name = max(types, key=lambda name: types[name])
    return Stored(format=name, bits=BITS[name])

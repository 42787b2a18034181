"""The matrices of a model by the names that checkpoints give them, so that lists of modules can be applied by part."""

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from itertools import product

from msgspec import Struct

from twin.models.config.shape import Shape
from twin.models.fields import Fields
from twin.models.mixers import Attention, LatentAttention, Mixer
from twin.models.spec import FeedForward, Part, in_order

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_OWN_PREFIX = re.compile(r"^(?:(?:model|language_model|transformer|backbone|decoder)\.)+")
_BACKTRACKS = re.compile(r"[+*}]\)[+*{]")  # a repetition of a repetition
_LONGEST = 500  # characters of a regular expression
_MOST = 256  # expressions in a list


class Module(Struct, frozen=True):
    """One matrix, or equal ones of all experts."""

    part: Part
    names: tuple[str, ...]  # without what comes before "layers."
    parameters: int
    inputs: int  # columns: what a scale per channel is divided among


def modules_of(shape: Shape) -> Iterator[Module]:
    """All matrices that a quantiser may take, from the first layer to the head."""
    for number, kind in enumerate(in_order(shape.order, shape.layers)):
        layer = shape.kinds[kind]
        matrices = [each for mixer in layer.mixers for each in _mixer(mixer, shape.hidden)]
        if layer.feed_forward is not None:
            matrices += _feed_forward(layer.feed_forward, shape.hidden)
        for part, names, parameters, inputs in matrices:
            yield Module(part, tuple(f"layers.{number}.{name}" for name in names), parameters, inputs)
    if not shape.tied:
        yield Module("head", ("lm_head", "output", "head"), shape.hidden * shape.vocab, shape.hidden)


_Matrix = tuple[Part, tuple[str, ...], int, int]


def _named(homes: str, names: str) -> tuple[str, ...]:
    """Each of the parents with each of the children."""
    return tuple(f"{home}.{name}" for home, name in product(homes.split(), names.split()))


_ATTENTION = "self_attn attention attn self_attention mixer"


def _mixer(mixer: Mixer, hidden: int) -> Iterator[_Matrix]:
    """Matrices of one mixer; small ones that quantisers leave alone count with the product that feeds the mixer."""
    whole = mixer.matrices(hidden)
    if isinstance(mixer, Attention):
        inner = mixer.query_heads * mixer.value_width
        keys, values = mixer.kv_heads * mixer.head_dim * hidden, mixer.kv_heads * mixer.value_width * hidden
        if not mixer.shares_kv:
            yield "attention", _named(_ATTENTION, "k_proj qkv_proj query_key_value"), keys, hidden
            yield "attention", _named(_ATTENTION, "v_proj qkv_proj query_key_value"), values, hidden
            whole -= keys + values
        yield "attention", _named(_ATTENTION, "o_proj dense out_proj"), inner * hidden, inner
        yield "attention", _named(_ATTENTION, "q_proj qkv_proj query_key_value"), whole - inner * hidden, hidden
    elif isinstance(mixer, LatentAttention):
        inner, expanded = mixer.query_heads * mixer.value_dim, mixer.query_heads * (mixer.nope_dim + mixer.value_dim)
        compressed = hidden * mixer.kv_elements
        yield "attention", _named(_ATTENTION, "o_proj"), inner * hidden, inner
        yield "attention", _named(_ATTENTION, "kv_b_proj"), mixer.kv_rank * expanded, mixer.kv_rank
        yield "attention", _named(_ATTENTION, "kv_a_proj_with_mqa"), compressed, hidden
        queries = whole - inner * hidden - mixer.kv_rank * expanded - compressed
        yield "attention", _named(_ATTENTION, "q_b_proj q_proj"), queries, mixer.query_rank or hidden
    else:
        homes = "linear_attn mixer mamba conv self_attn"
        outputs = whole // 4
        yield "attention", _named(homes, "out_proj o_proj"), outputs, hidden
        yield "attention", _named(homes, "in_proj_qkv in_proj_qkvz in_proj q_proj in_proj_z"), whole - outputs, hidden


def _feed_forward(feed: FeedForward, hidden: int) -> Iterator[_Matrix]:
    """Matrices of one MLP, or of all experts and the shared one; `other_matrices` go with the rest of their part."""
    counts = feed.parameters(hidden, feed.experts)
    always = int(counts["feed_forward"]) - feed.other_matrices
    if feed.experts == 1:
        yield from _mlp("feed_forward", "mlp feed_forward mixer", feed, always, (hidden, feed.intermediate))
        return
    homes = "mlp.experts block_sparse_moe.experts feed_forward.experts mixer.experts"
    for part, names, size, inputs in _mlp("experts", homes, feed, int(counts["experts"]), (hidden, feed.intermediate)):
        yield part, tuple(name.replace("experts.", "experts.0.") for name in names) + names, size, inputs
    if always:
        homes = "mlp.shared_experts mlp.shared_expert mlp.shared_mlp feed_forward.shared_expert mixer.shared_experts"
        yield from _mlp("feed_forward", homes, feed, always, (hidden, feed.shared_intermediate or hidden))


def _mlp(part: Part, homes: str, feed: FeedForward, parameters: int, widths: tuple[int, int]) -> Iterator[_Matrix]:
    """Two or three matrices of the same size, from one of the widths to the other and back."""
    size = parameters // (3 if feed.gated else 2)
    yield part, _named(homes, "up_proj gate_up_proj w3 fc1"), size, widths[0]
    yield part, _named(homes, "down_proj w2 fc2"), size, widths[1]
    if feed.gated:
        yield part, _named(homes, "gate_proj gate_up_proj w1"), size, widths[0]


class Patterns:
    """A list of modules as files write it: names of modules or of their parents, globs, "re:" and an expression."""

    def __init__(self, patterns: Iterable[str], fields: Fields, key: str) -> None:
        """Of the key of a table, which errors name. Raises BadFile of an expression that cannot be used."""
        self.names: set[tuple[str, ...]] = set()
        self.beginnings: set[str] = set()
        self.expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self.expressions.append(_expression(pattern[3:], fields, key))
            elif not re.search(r"[*?\[]", pattern):
                self.names.add(tuple(_OWN_PREFIX.sub("", pattern).split(".")))
            elif re.search(r"[*?\[]", pattern[:-1]) or not pattern.endswith("*"):
                self.expressions.append(_expression(translate(pattern), fields, key, parents=True))
            else:
                self.beginnings.add(_OWN_PREFIX.sub("", pattern[:-1]))
            if len(self.expressions) > _MOST:
                raise fields.wrong(key, f"has more than {_MOST} expressions")

    def __contains__(self, module: Module) -> bool:
        """Whether one of the module's names is meant."""
        return any(self._means(name) for name in module.names)

    def _means(self, name: str) -> bool:
        if self.names and self._is_named(tuple(name.split("."))):
            return True
        if self.beginnings and any(name[:end] in self.beginnings for end in range(1, len(name) + 1)):
            return True
        full = [f"{prefix}{name}" for prefix in _PREFIXES] if self.expressions else []
        return any(expression.match(each) for expression in self.expressions for each in full)

    def _is_named(self, components: tuple[str, ...]) -> bool:
        """Whether a run of the components is a name: of the module, of a parent, or of a kind such as "gate"."""
        length = len(components)
        return any(
            components[begin:end] in self.names for begin in range(length) for end in range(begin + 1, length + 1)
        )


def _expression(text: str, fields: Fields, key: str, *, parents: bool = False) -> re.Pattern[str]:
    """Of a glob with parents: the module may lie anywhere below what it names."""
    if parents:
        text = text.removesuffix(r"\Z").removesuffix(r"\z") + r"(?:\.|\Z)"
    if len(text) > _LONGEST or _BACKTRACKS.search(text):
        raise fields.wrong(key, f"has the expression {text[:60]!r}, which is too long or repeats a repetition")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        raise fields.wrong(key, f"has {text[:60]!r}, which is no regular expression") from None

"""A model from the header of its GGUF: the shape from the table of tensors, heads and states from the metadata."""

import re
from collections.abc import Iterator

from twin.errors import BadFile
from twin.models.assembly import completed, stacked
from twin.models.fields import BY_HAND, Fields, Understood, shown
from twin.models.gguf.blocks import CORRECTIONS, Block, blocks_of, in_layer, is_vector, kind_of
from twin.models.gguf.feeding import feed_forward_of
from twin.models.gguf.header import Header, Tensor
from twin.models.gguf.mixing import Reading
from twin.models.gguf.weights import Tally, part_in_layer
from twin.models.gguf.windows import windows_of
from twin.models.spec import SCHEMA, Layer, ModelSpec, NgramTable, Part

_PLAIN_WORD = re.compile(r"[\w.-]{1,64}")
_LONGEST_TITLE = 128  # letters
_TOWERS = {"v.": "vision", "mm.": "vision", "a.": "audio", "nextn.": "mtp"}
_PER_LAYER = "per_layer_token_embd.weight"
_TABLES = {_PER_LAYER, "position_embd.weight"}
_FIRST = {"per_layer_model_proj.weight", "altup_proj.weight"}
_LAST = {"altup_unembd_proj.weight", "output_hc_down.weight", "output_hc_up.weight"}
"""Matrices that each token runs through before the first layer and after the last one, and which count with it."""
_WITHOUT_EFFECT = (
    *("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count"),
    *("leading_dense_block_count", "interleave_moe_layer_step", "moe_every_n_layers", "vocab_size"),
    *("full_attention_interval", "attention.recurrent_layers"),
)
"""What the table of tensors says itself."""


class _Sorted:
    """Tensors by where they lie: all of them by part, those of layers by number and name, the rest by part.

    `first` and `last` are the parameters of matrices that count with the first and the last layer.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.layers: list[tuple[int, str, Tensor]] = []
        self.towers: dict[str, int] = {}
        self.outside: dict[Part, int] = {}
        self.first = self.last = 0


def model_of(header: Header, where: str, *, name: str) -> Understood:
    """The model; `name` is what it is called where the metadata do not say it. Raises BadFile."""
    about = Fields(header.metadata, where)
    architecture = about.text("general.architecture")
    if not _PLAIN_WORD.fullmatch(architecture):
        raise about.wrong("general.architecture", f"is {architecture[:64]!r}, not the name of an architecture")
    told = about.text("general.name", default="").strip()
    name = told if told.isprintable() and 0 < len(told) <= _LONGEST_TITLE else name
    own = f"{architecture}."
    fields = Fields({key[len(own) :]: told for key, told in about.raw.items() if key.startswith(own)}, where, own)
    try:
        spec = _spec(header.tensors, architecture, fields, name)
    except BadFile as wrong:
        raise BadFile(str(wrong), hint=wrong.hint or BY_HAND) from None
    except ValueError as wrong:  # ValidationError is one
        raise BadFile(f"{where}: {architecture}: {wrong}", hint=BY_HAND) from None
    others = {key: told for key, told in header.metadata.items() if not key.startswith(own)}
    ignored = (*fields.ignored(), *_summed_up(key for key in others if key not in about.used))
    ignored = tuple(sorted(key if key.isprintable() else shown(key) for key in ignored))
    return Understood(spec=spec, origins=about.origins() | fields.origins(), ignored=ignored)


def _spec(tensors: dict[str, Tensor], architecture: str, fields: Fields, name: str) -> ModelSpec:
    hidden, vocab = _embedding(tensors, fields)
    if not fields.flag("attention.causal", default=True):
        raise fields.wrong("attention.causal", "is false: a model that does not write token by token")
    if fields.integer("num_loops", default=1) > 1:
        raise fields.wrong("num_loops", f"is {fields.raw['num_loops']}: layers that run more than once are not known")
    fields.without_effect(*_WITHOUT_EFFECT)
    stored = fields.integer("block_count", high=4096)
    layers = stored - fields.integer("nextn_predict_layers", default=0, low=0, high=stored - 1)
    ngram = _ngram(tensors, fields, layers)
    held = _sorted({name: each for name, each in tensors.items() if not (ngram and name == _PER_LAYER)}, fields, layers)
    blocks = blocks_of(fields.where, held.layers, layers)
    reading = Reading(architecture, fields, hidden, layers, windows_of(architecture, fields, layers))
    outside = [0] * layers
    outside[0] += held.first
    outside[-1] += held.last
    kinds, order = stacked([_layer(block, reading, more) for block, more in zip(blocks, outside, strict=True)])
    plain = ModelSpec(
        schema=SCHEMA,
        name=name,
        summary="",
        source=f"GGUF of {name}, architecture {architecture}",
        hidden=hidden,
        vocab=vocab,
        layers=layers,
        kinds=kinds,
        order=order,
        residual_streams=fields.integer("hyper_connection.count", "altup.num_inputs", default=1),
        native_ctx_tokens=fields.integer("context_length"),
        tied="output.weight" not in tensors,
        vectors=held.outside.get("vectors", 0),
        tables=held.outside["embedding"] - hidden * vocab,
        towers=held.towers,
        weights=held.tally.weights(),
        ngram=ngram,
    )
    difference = held.tally.difference(plain)
    if difference:
        raise BadFile(f"{fields.where}: {difference}")
    return completed(plain)


def _embedding(tensors: dict[str, Tensor], fields: Fields) -> tuple[int, int]:
    """Width of the model and size of its vocabulary."""
    table = tensors.get("token_embd.weight")
    if table is None or len(table.dims) != 2:
        said = "is missing" if table is None else f"has dimensions {list(table.dims)}"
        raise BadFile(f"{fields.where}: tensor token_embd.weight {said}: no language model of one file")
    hidden, vocab = table.dims
    if fields.integer("embedding_length") != hidden:
        raise fields.wrong("embedding_length", f"is {fields.raw['embedding_length']}, token_embd.weight has {hidden}")
    head = tensors.get("output.weight")
    if head is not None and head.dims != table.dims:
        raise BadFile(f"{fields.where}: output.weight is {list(head.dims)}, token_embd.weight {list(table.dims)}")
    return hidden, vocab


def _ngram(tensors: dict[str, Tensor], fields: Fields, layers: int) -> NgramTable | None:
    """The table of hashed n-grams, of which each token reads a row for each head, before the layer that is named."""
    named = fields.integers("ple.layers", default=[], high=layers - 1)
    table = tensors.get(_PER_LAYER)
    if not named or table is None:
        return None
    if len(named) > 1:
        raise fields.wrong("ple.layers", "names several layers, which is not known of this architecture")
    heads = (fields.integer("ple.ngram_size", low=2, high=16) - 1) * fields.integer("ple.heads_per_ngram", high=4096)
    row = table._replace(dims=table.dims[:1])
    return NgramTable(
        table_bytes=table.size_bytes, row_bytes=row.size_bytes, rows_per_token=heads, before_layer=named[0]
    )


def _sorted(tensors: dict[str, Tensor], fields: Fields, layers: int) -> _Sorted:
    """All tensors; layers from `layers` on predict further tokens. Raises BadFile for an unknown one."""
    held, stored = _Sorted(), fields.integer("block_count")
    for name, tensor in tensors.items():
        found = in_layer(name)
        if found and found[0] >= stored:
            raise BadFile(f"{fields.where}: tensor {shown(name)} lies in layer {found[0]}, and block_count is {stored}")
        tower = _tower(name, found, layers)
        if tower:
            held.towers[tower] = held.towers.get(tower, 0) + tensor.elements
        elif found:
            held.layers.append((*found, tensor))
            held.tally.add(part_in_layer(found[1], tensor), tensor, learned=kind_of(found[1])[0] not in CORRECTIONS)
        else:
            part = _part_outside(name, tensor, fields.where)
            held.outside[part] = held.outside.get(part, 0) + tensor.elements
            held.first += tensor.elements if name in _FIRST else 0
            held.last += tensor.elements if name in _LAST else 0
            held.tally.add(part, tensor)
    return held


def _tower(name: str, found: tuple[int, str] | None, layers: int) -> str:
    """What a tensor belongs to that is no part of the language model; empty: it is a part."""
    if found:
        index, name = found
        if index >= layers:
            return "mtp"
        if name.startswith("vis_"):
            return "vision"
    return next((tower for prefix, tower in _TOWERS.items() if name.startswith(prefix)), "")


def _part_outside(name: str, tensor: Tensor, where: str) -> Part:
    if name == "token_embd.weight" or name in _TABLES:
        return "embedding"
    if name == "output.weight":
        return "head"
    if name in _FIRST or name in _LAST:
        return "feed_forward"
    if not is_vector(name, tensor):
        raise BadFile(f"{where}: tensor {shown(name)} is of a kind that is not known")
    return "vectors"


def _layer(block: Block, reading: Reading, outside: int) -> Layer:
    mixers = reading.mixers(block)
    feed_forward = feed_forward_of(block, reading.fields, reading.hidden, outside)
    if block.matrices:
        name = shown(min(block.matrices))[1:-1]
        raise block.wrong(f"{name}: of a kind that is not known, or not beside what else the layer has")
    return Layer(mixers=mixers, feed_forward=feed_forward, vectors=sum(block.vectors.values()))


def _summed_up(keys: Iterator[str]) -> Iterator[str]:
    """Keys of other things than the architecture, one entry for each thing."""
    counts: dict[str, int] = {}
    for key in keys:
        thing = key.partition(".")[0]
        counts[thing] = counts.get(thing, 0) + 1
    yield from (f"{thing}.* ({count} keys)" if count > 1 else f"{thing}.*" for thing, count in counts.items())

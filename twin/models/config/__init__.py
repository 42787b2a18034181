"""Reading a Hugging Face config.json: which architecture it is, its shape, and how its weights are stored."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from twin.errors import BadFile
from twin.models.assembly import completed
from twin.models.config.architectures import reader_of, readers
from twin.models.config.quantisation import read_weights
from twin.models.config.shape import Reader, Shape
from twin.models.config.towers import towers_of
from twin.models.config.without_effect import WITHOUT_EFFECT
from twin.models.fields import BY_HAND, Fields, Understood, shown
from twin.models.spec import SCHEMA, ModelSpec, NgramTable, Weights

_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")
"""Tables that hold the language model of a multimodal one."""

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11_008}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"vocab_size": 32_000, "max_position_embeddings": 2048},
    "mistral": _LLAMA
    | {"intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 131_072},
    "qwen2": _LLAMA | {"intermediate_size": 22_016, "vocab_size": 151_936, "max_position_embeddings": 32_768},
}
"""What a multimodal file leaves out of its language model, by `model_type`: it says only what differs from the class.

Source: the configuration classes of transformers. A file of its own always holds these keys.
"""


def read_config(raw: dict[str, Any], where: str, *, name: str, beside: Fields | None = None) -> Understood:
    """The model called `name` that the config.json at `where` describes. Raises BadFile.

    beside: a file that says how weights are quantised where the config.json does not.
    """
    outer = Fields(raw, where)
    tables = [outer]
    while (inner := _language(tables[-1])) is not None:
        tables.append(inner)
    architecture, reader = _reader(tables, where)
    for table in tables:
        nulls = (key for key, value in table.raw.items() if value is None)
        table.without_effect(*WITHOUT_EFFECT, *nulls)
        table.checked("architectures", "model_type")
    try:
        shape = reader(tables[-1])
        shape = replace(shape, towers=shape.towers | towers_of(outer, shape.hidden))
        weights = read_weights(tables, shape, beside)
        spec = _spec(shape, weights, name)
        spec = completed(replace(spec, full_states=bool(spec.states) and _full_states(tables[-1], architecture)))
    except (msgspec.ValidationError, ValueError) as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{where}: {architecture}: {wrong}") from None
    origins = {"architecture": architecture} | outer.origins()
    if beside is not None:
        origins |= {f"{Path(beside.where).name}: {key}": value for key, value in beside.origins().items()}
    return Understood(spec=spec, origins=origins, ignored=outer.ignored())


def _full_states(inner: Fields, architecture: str) -> bool:
    """Whether states are wanted in fp32; Nemotron-H's are unless it says otherwise (vLLM `models/config.py`)."""
    said = [inner.text(key) for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype") if key in inner]
    return "float32" in said if said else architecture in ("NemotronHForCausalLM", "nemotron_h")


def _language(outer: Fields) -> Fields | None:
    """The table of the language model in a multimodal one's; whether the head is tied is said outside."""
    inner = next((inner for key in _LANGUAGE if (inner := outer.table(key)) is not None), None)
    if inner is not None:
        kind = inner.raw.get("model_type")
        inner.raw = DEFAULTS.get(kind if isinstance(kind, str) else "", {}) | inner.raw
    if inner is not None and "tie_word_embeddings" in outer:
        inner.raw = inner.raw | {"tie_word_embeddings": outer.raw["tie_word_embeddings"]}
        outer.without_effect("tie_word_embeddings")
    return inner


def _reader(tables: list[Fields], where: str) -> tuple[str, Reader]:
    """The name that is known, and its reader: of the innermost table first. Raises BadFile."""
    names = [name for table in reversed(tables) for name in _names(table)]
    if not names:
        raise BadFile(f"{where}: architectures and model_type are missing", hint=BY_HAND)
    for name in names:
        if (reader := reader_of(name)) is not None:
            return name, reader
    from hwprofiles.spelling import nearest  # noqa: PLC0415 - of a refusal alone

    asked = names[-1][:100]
    near = nearest(asked, readers())
    raise BadFile(
        f"{where}: architecture {shown(asked)} is not known",
        hint=(f"the nearest known one is {near}; " if near else "") + BY_HAND,
    )


def _names(table: Fields) -> Iterator[str]:
    """What one table calls itself: a class, or else a type; both where it is a part of a larger model."""
    classes = table.texts("architectures", default=[])
    yield from classes[:1]
    if table.prefix or not classes:
        kind = table.text("model_type", default="")
        if kind:
            yield kind


def _spec(shape: Shape, weights: Weights, name: str) -> ModelSpec:
    return ModelSpec(
        schema=SCHEMA,
        name=name,
        summary="",
        source=f"config.json of {name}",
        hidden=shape.hidden,
        vocab=shape.vocab,
        layers=shape.layers,
        kinds=shape.kinds,
        order=shape.order,
        residual_streams=shape.residual_streams,
        native_ctx_tokens=shape.native_ctx_tokens,
        tied=shape.tied,
        vectors=shape.vectors,
        tables=shape.tables,
        towers=shape.towers,
        weights=weights,
        ngram=_ngram(shape, weights),
    )


def _ngram(shape: Shape, weights: Weights) -> NgramTable | None:
    """The table of n-grams as embeddings are stored, every row in whole bytes."""
    if shape.ngram is None:
        return None
    row_bytes = ceil(shape.ngram.row_elements * weights.stored("embedding").bits / 8)
    return NgramTable(
        table_bytes=row_bytes * shape.ngram.parameters // shape.ngram.row_elements,
        row_bytes=row_bytes,
        rows_per_token=shape.ngram.rows_per_token,
        before_layer=shape.ngram.before_layer,
    )

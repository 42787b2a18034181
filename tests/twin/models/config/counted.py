"""Small configurations with the parameters that transformers' own classes have, embeddings that are shared once."""

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from twin.models.config import read_config
from twin.models.mixers import Attention, LatentAttention, conv_elements
from twin.models.spec import Layer, ModelSpec


class Counted(Struct):
    """A config.json, and what the class has: parameters of the language model and of towers, buffers left out.

    cache: of each layer the elements that a token adds and those that do not grow, after a pass over a few tokens.
    """

    name: str
    config: dict[str, Any]
    parameters: int
    towers: int
    cache: list[tuple[int, int]] = []


def counted(family: str) -> list[Counted]:
    """Rows of one family."""
    table = json.loads((Path(__file__).parent / "rows" / f"{family}.json").read_text())["models"]
    return [msgspec.convert(row | {"name": name}, Counted) for name, row in table.items()]


def cached(family: str) -> list[Counted]:
    """Rows of one family of which the cache was looked at."""
    return [row for row in counted(family) if row.cache]


def one(family: str, name: str, **changes: Any) -> dict[str, Any]:
    """One row's configuration with keys changed, or taken away where they are None."""
    config = next(row.config for row in counted(family) if row.name == name)
    return {key: value for key, value in (config | changes).items() if value is not None}


def spec(config: dict[str, Any]) -> ModelSpec:
    """As it is read."""
    return read_config(config, "config.json", name="small").spec


def kept(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each layer as read: elements that a token adds, and those that do not grow.

    The class keeps as many inputs of a short convolution as it has taps, the newest included.
    """
    model = spec(config)
    return [_of_layer(model.kinds[kind]) for kind in model.layer_kinds]


def _of_layer(layer: Layer) -> tuple[int, int]:
    grows = fixed = 0
    for mixer in layer.mixers:
        if isinstance(mixer, Attention | LatentAttention):
            grows += mixer.kv_elements if mixer.keeps_cache else 0
            grows += mixer.indexer.head_dim if mixer.indexer and not mixer.indexer.shared else 0
        else:
            fixed += mixer.state_elements + conv_elements(mixer) + mixer.conv_channels
    return grows, fixed


def total(config: dict[str, Any]) -> float:
    """Parameters of the language model as read."""
    return sum(spec(config).parameters.values())

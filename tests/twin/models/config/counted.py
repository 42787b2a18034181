"""Small configurations with the parameters that transformers' own classes have, embeddings that are shared once."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from twin.models.config import read_config
from twin.models.spec import ModelSpec


class Counted(Struct):
    """A config.json, and what the class counts: of the language model, with routers' biases, and of towers."""

    name: str
    config: dict[str, Any]
    parameters: int
    towers: int


def counted(family: str) -> list[Counted]:
    """Rows of one family."""
    table = json.loads((Path(__file__).parent / "rows" / f"{family}.json").read_text())["models"]
    return [Counted(name, row["config"], row["parameters"], row["towers"]) for name, row in table.items()]


def one(family: str, name: str, **changes: Any) -> dict[str, Any]:
    """One row's configuration with keys changed, or taken away where they are None."""
    config = next(row.config for row in counted(family) if row.name == name)
    return {key: value for key, value in (config | changes).items() if value is not None}


def spec(config: dict[str, Any]) -> ModelSpec:
    """As it is read."""
    return read_config(config, "config.json", name="small").spec


def total(config: dict[str, Any]) -> float:
    """Parameters of the language model as read."""
    return sum(spec(config).parameters.values())

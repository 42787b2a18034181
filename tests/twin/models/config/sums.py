"""Small made-up configurations and what transformers' own classes sum up to, built on its meta device.

`sums.json` names the version. A row is remade by `sum(p.numel() for p in cls(config).parameters())` under
`torch.device("meta")` with tied weights; towers and layers that only predict more tokens are left out, and so
are buffers, such as most biases of routers.
"""

import json
from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

from twin.models import ModelSpec
from twin.models.config import read_config

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("sums.json").read_text(encoding="utf-8"))["rows"]


def rows_of(known: Collection[str]) -> list[Any]:
    """(configuration, parameters) of the architectures that are known."""
    return [(row["config"], row["parameters"]) for row in ROWS if row["config"]["architectures"][0] in known]


def name_of(value: object) -> str:
    """An id of a row: its architecture."""
    return value["architectures"][0] if isinstance(value, dict) else ""


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """The model of a configuration with some keys changed; None takes a key away."""
    changed = {key: value for key, value in (config | changes).items() if value is not None}
    return read_config(changed, "config.json", name="toy").spec


def row(architecture: str) -> dict[str, Any]:
    """The first configuration of an architecture."""
    return deepcopy(next(each["config"] for each in ROWS if each["config"]["architectures"] == [architecture]))

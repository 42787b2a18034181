"""What is published about a format's effect on answers: carried beside predictions, never predicted or mixed in."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hwprofiles.files import read_json
from twin.errors import BadFile
from twin.models import ModelSpec

QUALITY = Path(__file__).parent.parent / "models" / "quality"


class Quality(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published figure of one format."""

    kv_dtype: str
    metric: Literal["perplexity", "perplexity_change_percent", "needle"]
    value: Annotated[float, Meta(ge=0)]
    """Perplexity, its change against 16 bits in per cent, or 1 where a needle was found."""
    conditions: str
    source: str


def published_quality(model: ModelSpec, kv_dtype: str) -> tuple[Quality, ...]:
    """All that is published of that format for the model's family; empty where nothing is."""
    return tuple(row for row in _rows(model.family or model.name) if row.kv_dtype == kv_dtype)


@cache
def _rows(family: str) -> tuple[Quality, ...]:
    path = QUALITY / f"{family}.json"
    if "/" in family or not path.exists():
        return ()
    try:
        return msgspec.convert(read_json(path), tuple[Quality, ...])
    except msgspec.ValidationError as wrong:
        raise BadFile(f"{path}: {wrong}") from None

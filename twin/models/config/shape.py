"""What the reader of one architecture gives back: a model without its name and its weights."""

from collections.abc import Callable

from msgspec import Struct

from twin.models.fields import Fields
from twin.models.spec import Layer


class Ngram(Struct, frozen=True, kw_only=True):
    """A table of hashed n-grams before its bits are known; `parameters` are counted nowhere else."""

    parameters: int
    row_elements: int
    rows_per_token: int
    before_layer: int


class Shape(Struct, frozen=True, kw_only=True):
    """As in `ModelSpec`; `order` may name layers one by one."""

    hidden: int
    vocab: int
    layers: int
    kinds: dict[str, Layer]
    order: tuple[tuple[str, int], ...]
    native_ctx_tokens: int
    tied: bool
    vectors: int
    tables: int = 0
    towers: dict[str, int] = {}
    residual_streams: int = 1
    ngram: Ngram | None = None


Reader = Callable[[Fields], Shape]
"""From the configuration of a language model (`text_config` where there is one) to its shape. Raises BadFile."""


def in_runs(kinds: list[str]) -> tuple[tuple[str, int], ...]:
    """Kinds of layers one after the other as (kind, how many in a row), and only the first period where they repeat."""
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    for period in range(1, len(runs)):
        repeated = [kind for kind, count in (runs[:period] * (len(runs) // period + 1)) for _ in range(count)]
        if repeated[: len(kinds)] == kinds:
            return tuple(runs[:period])
    return tuple(runs)

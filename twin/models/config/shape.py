"""What the reader of one architecture gives back: a model without its name and its weights."""

from collections.abc import Callable

from msgspec import Struct

from twin.models.assembly import Order
from twin.models.fields import Fields
from twin.models.spec import Layer


class Ngram(Struct, frozen=True, kw_only=True):
    """A table of hashed n-grams before its bits are known; `parameters` are counted nowhere else."""

    parameters: int
    row_elements: int
    rows_per_token: int
    before_layer: int


class Shape(Struct, frozen=True, kw_only=True):
    """As in `ModelSpec`."""

    hidden: int
    vocab: int
    layers: int
    kinds: dict[str, Layer]
    order: Order
    native_ctx_tokens: int
    tied: bool
    vectors: int
    tables: int = 0
    towers: dict[str, int] = {}
    residual_streams: int = 1
    ngram: Ngram | None = None


Reader = Callable[[Fields], Shape]
"""From the configuration of a language model (`text_config` where there is one) to its shape. Raises BadFile."""

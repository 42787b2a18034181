"""How far each layer sees: 0 for all tokens, or the tokens of a sliding window, the query's own included."""

from collections.abc import Callable

from twin.models.config.blocks import FULL, SLIDING, check_number, layer_types
from twin.models.fields import Fields

Windows = Callable[[Fields, int], list[int]]
"""From the fields and the number of layers to each layer's window."""


def unlimited(fields: Fields, layers: int) -> list[int]:
    """Full attention in all layers."""
    del fields
    return [0] * layers


def same(default: int = 0) -> Windows:
    """`sliding_window` in all layers; null: none."""

    def windows(fields: Fields, layers: int) -> list[int]:
        return [_window(fields, default)] * layers

    return windows


def typed(period: int, *, full: int = -1, default: int = 0, key: str = "sliding_window_pattern") -> Windows:
    """By `layer_types`, or else the `full`-th of every `period` layers sees all and the others a window, if any.

    The key is another period; a period of 1 means full attention, one of 0 windows in all layers.
    """

    def windows(fields: Fields, layers: int) -> list[int]:
        each = _period(fields, key, period)
        slides = _window(fields, default) > 0
        by_default = [
            SLIDING if slides and (not each or layer % each != full % each) else FULL for layer in range(layers)
        ]
        return of_types(fields, layer_types(fields, layers, by_default), default)

    return windows


def qwen(fields: Fields, layers: int) -> list[int]:
    """Qwen 2 and 3: none unless `use_sliding_window`; then from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window", default=False):
        fields.without_effect("sliding_window", "max_window_layers", "layer_types")
        return [0] * layers
    first = fields.integer("max_window_layers", default=28, low=0)
    by_default = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return of_types(fields, layer_types(fields, layers, by_default), 4096)


def smollm(fields: Fields, layers: int) -> list[int]:
    """SmolLM 3: none unless `use_sliding_window`; then in layers without rotary positions."""
    slides = fields.flag("use_sliding_window", default=False)
    roped = fields.integers("no_rope_layers", default=[])  # 1 where positions are rotary
    if roped:
        check_number(fields, "no_rope_layers", roped, layers)
    period = fields.integer("no_rope_layer_interval", default=4)
    roped = roped or [(layer + 1) % period for layer in range(layers)]
    return of_types(fields, layer_types(fields, layers, [FULL if not slides or each else SLIDING for each in roped]))


def of_types(fields: Fields, types: list[str], default: int = 0) -> list[int]:
    """The window of each layer from its type. Raises BadFile where a layer slides and there is no window."""
    if SLIDING not in types:
        fields.without_effect("sliding_window")
        return [0] * len(types)
    window = _window(fields, default)
    if not window:
        raise fields.contradiction("layers slide, but over no window", "layer_types", "sliding_window")
    return [window if each == SLIDING else 0 for each in types]


def _window(fields: Fields, default: int) -> int:
    """A key that is null means no window, one that is missing the default."""
    if fields.raw.get("sliding_window", default) is None:
        fields.without_effect("sliding_window")
        return 0
    return fields.integer("sliding_window", default=default, low=0)


def _period(fields: Fields, key: str, default: int) -> int:
    """A number, or as EXAONE 4 writes it: letters such as "LLLG"."""
    if isinstance(fields.raw.get(key), str):
        return len(fields.text(key))
    return fields.integer(key, default=default, low=0)


def from_layer(key: str) -> Windows:
    """Windows from the layer on that a key says; `layer_types` first."""

    def windows(fields: Fields, layers: int) -> list[int]:
        begin = fields.integer(key, default=layers, low=0)
        slides = _window(fields, 0) > 0
        by_default = [SLIDING if slides and layer >= begin else FULL for layer in range(layers)]
        return of_types(fields, layer_types(fields, layers, by_default))

    return windows

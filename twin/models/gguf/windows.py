"""Which layers see a window of tokens only.

`attention.sliding_window_pattern` is a flag for each layer, or a period of which every layer but the last has the
window. Where files lack it llama.cpp has a period by architecture, and where it knows of none it attends to all tokens
whatever `attention.sliding_window` says (as it does for Phi-3). Source: `load_arch_hparams` in `src/models/` of
github.com/ggml-org/llama.cpp.
"""

from typing import NamedTuple

from twin.models.fields import Fields


class Rule(NamedTuple):
    """What llama.cpp does of its own with an architecture's layers."""

    period: int  # 0: all layers have the window
    full_first: bool = False  # the first layer of a period sees all, and not the last
    window: int | None = None  # tokens, where the file says nothing; 0: all; None: it has to say it
    fixed: int = 0  # tokens, whatever the file says
    chunked: bool = False  # local chunks, not a window that slides


RULES = {
    "afmoe": Rule(4, window=0),
    "cohere2": Rule(4),
    "cohere2moe": Rule(4, full_first=True),
    "exaone-moe": Rule(4),
    "gemma2": Rule(2, window=4096),
    "gemma3": Rule(6, window=0),
    "gemma3n": Rule(5),
    "gpt-oss": Rule(2),
    "laguna": Rule(4, full_first=True, window=0),
    "lfm2": Rule(0, window=0),
    "llama4": Rule(4, window=8192, fixed=8192, chunked=True),
    "mellum": Rule(4, window=0),
    "muse-glimmer": Rule(4),
    "olmo2": Rule(4, window=0),
    "plamo3": Rule(8, window=0),
    "smallthinker": Rule(4, full_first=True, fixed=4096, window=0),
}
_EXAONE_4, _LAYERS_OF_EXAONE_4 = Rule(4, window=4096), 64  # the smaller one, of 30 layers, has no window
_PER_LAYER = Rule(1)  # of an architecture that is not above: every file says it
_WITHOUT = {"phi3"}

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


class Windows(NamedTuple):
    """Tokens of the window or the chunk, and whether each layer has it."""

    tokens: int
    chunked: bool
    layers: list[bool]

    def window(self, layer: int) -> int:
        """Tokens of a layer's window; 0: none."""
        return self.tokens if self.layers[layer] and not self.chunked else 0

    def chunk(self, layer: int) -> int:
        """Tokens of a layer's chunks; 0: none."""
        return self.tokens if self.layers[layer] and self.chunked else 0


def windows_of(architecture: str, fields: Fields, layers: int) -> Windows:
    """The windows of all layers. Raises BadFile."""
    rule = RULES.get(architecture, _PER_LAYER)
    without = architecture in _WITHOUT
    if architecture == "exaone4":
        rule, without = _EXAONE_4, layers != _LAYERS_OF_EXAONE_4
    if without or (rule is _PER_LAYER and _PATTERN not in fields):
        return Windows(0, chunked=False, layers=[False] * layers)
    tokens = fields.integer(_WINDOW, default=rule.window, low=0)
    tokens = rule.fixed if rule.fixed and tokens else tokens
    flags = _flags(rule, fields, layers) if tokens else [False] * layers
    return Windows(tokens, rule.chunked, flags)


def _flags(rule: Rule, fields: Fields, layers: int) -> list[bool]:
    if isinstance(fields.raw.get(_PATTERN), list):
        told = [bool(flag) for flag in fields.integers(_PATTERN, high=1)]
        if len(told) < layers:
            raise fields.wrong(_PATTERN, f"has {len(told)} flags, and the model {layers} layers")
        return told[:layers]
    period = fields.integer(_PATTERN, default=rule.period, low=0)
    if not period:
        return [True] * layers
    full = 0 if rule.full_first else period - 1
    return [layer % period != full for layer in range(layers)]

"""The same shape in other weights: what `--weights q4_k_m`, `awq`, `fp8` or `4.05bpw` stands for, part by part.

Bits count scales and zeros. Sources: llama.cpp `ggml-common.h` (blocks) and `src/llama-quant.cpp` (which tensors of a
mix take the wider type); AutoAWQ, AutoGPTQ and compressed-tensors (groups of 128); bitsandbytes (blocks of 64); OCP
Microscaling (mxfp4), NVIDIA ModelOpt (nvfp4); exllamav3 `conversion/quant_config.py` (heads).
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from hwprofiles.spelling import match
from twin.errors import BadValue
from twin.models.ggml import BITS, QUANTISED
from twin.models.mixers import Attention
from twin.models.spec import ModelSpec, Part, Stored, Weights

Wider = Mapping[str, Callable[[int], float]]


class _Mix(NamedTuple):
    """Types of a mix of llama.cpp: of most matrices, and of the few that are wider in so many of the layers."""

    base: str
    values: Wider = MappingProxyType({})  # type of the values' projection -> share of the layers
    down: Wider = MappingProxyType({})  # the same of the feed-forward's last matrix
    output: str = ""  # type of attention's output, where it is another


def _more(layers: int) -> float:
    """Share of the layers that get more bits: the first and last eighth, and every third between them."""
    first, last = layers // 8, 7 * layers // 8
    return sum(at < first or at >= last or (at - first) % 3 == 2 for at in range(layers)) / layers


def _first(part: int) -> Callable[[int], float]:
    return lambda layers: layers // part / layers


def _few(count: int) -> Callable[[int], float]:
    return lambda layers: min(1.0, count / layers)


def _all(_: int) -> float:
    return 1.0


_MIXES = {
    "q5_k_m": _Mix("q5_k", {"q6_k": _more}, {"q6_k": _more}),
    "q5_k_s": _Mix("q5_k"),
    "q4_k_m": _Mix("q4_k", {"q6_k": _more}, {"q6_k": _more}),
    "q4_k_s": _Mix("q4_k", {"q5_k": _few(4)}, {"q5_k": _first(8)}),
    "q3_k_l": _Mix("q3_k", {"q5_k": _all}, {"q5_k": _all}, "q5_k"),
    "q3_k_m": _Mix("q3_k", {"q4_k": _all, "q5_k": _few(2)}, {"q4_k": _all, "q5_k": _first(16)}, "q4_k"),
    "q3_k_s": _Mix("q3_k"),
    "q2_k": _Mix("q2_k", {"q4_k": _all}, {"q3_k": _all}, "q3_k"),
    "iq4_nl": _Mix("iq4_nl", {"q5_k": _all}, {"q5_k": _first(8)}),
    "iq4_xs": _Mix("iq4_xs", {"q5_k": _all}, {"q5_k": _first(8)}),
    "iq3_s": _Mix("iq3_s", {"q4_k": _all}),
}
"""What `llama-quantize` makes of a name, of models with four or more query heads a KV head and without a matrix of
importances; other names stand for one type throughout, which for i-quants below 3 bits is up to 6 % off."""

_UNIFORM: dict[str, tuple[str, float]] = {
    "fp32": ("fp32", 32), "bf16": ("bf16", 16), "fp16": ("bf16", 16), "f16": ("bf16", 16),
    "fp8": ("fp8", 8), "fp8_block": ("fp8", 8 + 32 / 128**2), "int8": ("int8", 8), "w8a8": ("int8", 8),
    "w8a16": ("w8a16", 8 + 16 / 128), "w4a16": ("w4a16", 4 + 16 / 128), "gptq": ("w4a16", 4 + 20 / 128),
    "awq": ("w4a16", 4 + 20 / 128), "nf4": ("nf4", 4 + 8 / 64 + 32 / (64 * 256)), "nvfp4": ("nvfp4", 4.5),
    "mxfp4": ("mxfp4", 4.25),
}  # fmt: skip
"""Formats in which a checkpoint keeps its layers' matrices, its two ends staying in 16 bits."""

_BITS_A_WEIGHT = re.compile(r"(\d{1,2}(?:\.\d{1,3})?)[\s_-]*bpw")
_ENDS: tuple[Part, ...] = ("embedding", "head", "router")
_BF16 = Stored(format="bf16", bits=16)


def weight_names() -> list[str]:
    """What `--weights` takes, beside N.NNbpw."""
    return sorted({*_UNIFORM, *QUANTISED, *_MIXES})


def in_weights(model: ModelSpec, asked: str) -> ModelSpec:
    """The model with its matrices stored otherwise. Raises BadValue for a name that is not known."""
    ends: dict[Part, Stored]
    found = _BITS_A_WEIGHT.fullmatch(asked.lower())
    if found is not None:
        bits = float(found[1])
        if not 1 <= bits <= 8:
            raise BadValue(f"--weights: {bits:g} bits a weight is outside the range of 1 to 8")
        ends = {"embedding": _BF16, "head": Stored(format="exl3", bits=max(6.0, bits))}
        weights = Weights(format="exl3", bits=bits, parts=ends)
        return replace(model, weights=weights, tied=False)  # a tied head is quantised apart
    name = match(asked, weight_names())
    if name is None:
        raise BadValue(f"--weights: {asked!r} is not known", hint=f"N.NNbpw, or one of {', '.join(weight_names())}")
    if name in _UNIFORM:
        stored, bits = _UNIFORM[name]
        ends = dict.fromkeys(_ENDS, _BF16) if bits < 16 else {}
        return replace(model, weights=Weights(format=stored, bits=bits, parts=ends))
    return replace(model, weights=_ggml(model, _MIXES.get(name, _Mix(name))))


def _ggml(model: ModelSpec, mix: _Mix) -> Weights:
    """A mix: the output in at least 6 bits, and the embedding with it where it is the head; norms and router in 32."""
    base, layers = BITS[mix.base], model.layers
    values, output = (_share(model, which) for which in ("values", "output"))
    attention = base + values * _wider(mix.values, base, layers)
    if mix.output:
        attention += output * (BITS[mix.output] - base)
    down = base + _wider(mix.down, base, layers) / 3
    head = "q6_k" if base < BITS["q6_k"] else mix.base
    embedding = head if model.tied else mix.base
    parts: dict[Part, Stored] = {
        "attention": Stored(format=mix.base, bits=attention),
        "feed_forward": Stored(format=mix.base, bits=down),
        "experts": Stored(format=mix.base, bits=down),
        "router": Stored(format="f32", bits=32),
        "vectors": Stored(format="f32", bits=32),
        "embedding": Stored(format=embedding, bits=BITS[embedding]),
        "head": Stored(format=head, bits=BITS[head]),
    }
    return Weights(format=mix.base, bits=base, parts=parts)


def _wider(types: Wider, base: float, layers: int) -> float:
    """Bits beyond the base, the mean over layers; each type takes its share from the one before it."""
    bits, before = 0.0, base
    for name, share in types.items():
        bits += share(layers) * (BITS[name] - before)
        before = BITS[name]
    return bits


def _share(model: ModelSpec, which: str) -> float:
    """Share of the mixers' parameters that project values, or outputs."""
    found = 0
    for mixer, count in model.mixers.items():
        if isinstance(mixer, Attention):
            heads = mixer.query_heads if which == "output" else 0 if mixer.shares_kv else mixer.kv_heads
            found += count * heads * mixer.value_width * model.hidden
    return found / model.parameters["attention"] if model.parameters.get("attention") else 0.0

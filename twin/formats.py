"""In how many bits a cache keeps K and V: one row a format, its bytes counted plane by plane.

Sources of the layouts: vLLM 0.28.0 `v1/attention/backends/triton_attn.py` (per token and head) and
`model_executor/layers/quantization/turboquant/`; huawei-csl/KVarN and its port in syv-ai/qwen38-27b-rtx3090
(`kvarn/.../config.py`); exllamav3 `exllamav3_ext/cache/q_cache_kernels.cuh`; llama.cpp `ggml-common.h`.
"""

import math
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from twin.errors import find

EXL3_BITS = range(2, 9)  # bits that exllamav3's cache takes for K and for V
PAIR = "/"  # between the formats of K and of V where these differ
Kind = Literal["plain", "scaled", "rotated"]  # how values are coded: as they are, by a scale, or rotated and by a scale


class Plane(Struct, frozen=True, kw_only=True):
    """Stored bytes of K or of V. Scales and zero points are counted where they are kept."""

    bits: int
    head_bytes: int = 0  # per token and head: a scale, a norm, a zero point
    group_elements: int = 0  # elements that share a group's scale; 0 where there are no groups
    group_bytes: int = 0
    channel_bytes: int = 0  # per channel of a tile of `tile_tokens` tokens
    tile_tokens: int = 1

    def tile_bytes(self, head_dim: int) -> int:
        """Bytes of one head over one tile, its scales included; whole bytes."""
        bits = self.bits * head_dim * self.tile_tokens
        groups = head_dim * self.tile_tokens // self.group_elements if self.group_elements else 0
        scales = self.head_bytes * self.tile_tokens + self.channel_bytes * head_dim
        return -(-bits // 8) + groups * self.group_bytes + scales


class KVFormat(Struct, frozen=True, kw_only=True):
    """One way to keep K and V."""

    name: str
    summary: str
    key: Plane
    value: Plane
    kind: Kind
    slot_alignment: int = 1  # bytes of one token and head are rounded up to a multiple of this
    min_capability: str = ""  # least compute capability that its published kernels start on; empty: any
    sidecar_bytes: int = 0  # bytes an element of tokens that wait unquantised for their tile to fill; 0: none wait
    rated_as: str = ""  # format whose kernels' rates apply, where K and V are of two; empty: its own

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the formats of K and V."""
        return tuple(self.name.split(PAIR))

    @property
    def tile_tokens(self) -> int:
        """Tokens that are quantised together."""
        return math.lcm(self.key.tile_tokens, self.value.tile_tokens)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that is kept beside K and V, such as an indexer key: those planes are never quantised."""
        return self.key.bits // 8 if self.kind == "plain" else 2

    def plane_bytes(self, *, kv_heads: int, head_dim: int, value_dim: int | None = None) -> int:
        """Bytes of K and V together, for one token in one layer, scales included; rounded up to whole bytes.

        Values are as wide as keys unless `value_dim` says otherwise.
        """
        tile = self.tile_tokens
        both = self._tiles(self.key, head_dim) + self._tiles(self.value, value_dim or head_dim)
        if self.slot_alignment > 1:
            both = -(-both // (tile * self.slot_alignment)) * self.slot_alignment * tile
        return -(-both * kv_heads // tile)

    def _tiles(self, plane: Plane, head_dim: int) -> int:
        return plane.tile_bytes(head_dim) * (self.tile_tokens // plane.tile_tokens)

    def check(self, *, head_dim: int) -> str:
        """Why heads of `head_dim` elements cannot be kept in it; empty where they can."""
        for plane in (self.key, self.value):
            if plane.group_elements and head_dim % plane.group_elements:
                return f"{self.name} needs head sizes that are multiples of {plane.group_elements}, not {head_dim}"
            if plane.bits * head_dim % 8:
                return (
                    f"{self.name} packs {plane.bits}-bit codes of a head into whole bytes: {head_dim} do not fill them"
                )
        return ""


def _alike(name: str, plane: Plane, summary: str, *, kind: Kind = "scaled", needs: str = "") -> KVFormat:
    """K and V in planes of one kind."""
    return KVFormat(name=name, summary=summary, key=plane, value=plane, kind=kind, min_capability=needs)


def _per_token_head(bits: int) -> Plane:
    """One fp32 scale per token and head, inline (int4 hides its zero point in the scale's low bits)."""
    return Plane(bits=bits, head_bytes=4)


def _grouped(bits: int, *, group_bytes: int = 2) -> Plane:
    """Groups of 32 elements along the heads, each with an fp16 scale and what else `group_bytes` counts."""
    return Plane(bits=bits, group_elements=32, group_bytes=group_bytes)


def _halves(bits: int) -> Plane:
    """Groups of 64 elements, each with a scale and a zero point in 16 bits."""
    return Plane(bits=bits, group_elements=64, group_bytes=4)


def _kvarn(key_bits: int, value_bits: int, tile: int) -> KVFormat:
    """K: fp16 scale and zero a channel, scale a token; V: fp16 scale a channel, scale and zero a token; per tile."""
    return KVFormat(
        name=f"kvarn_k{key_bits}v{value_bits}_g{tile}",
        summary=f"KVarN: rotated, variance-normalised tiles of {tile} tokens, K {key_bits} bits, V {value_bits} bits",
        key=Plane(bits=key_bits, head_bytes=2, channel_bytes=4, tile_tokens=tile),
        value=Plane(bits=value_bits, head_bytes=4, channel_bytes=2, tile_tokens=tile),
        kind="rotated",
        sidecar_bytes=2,
    )


def _turboquant(name: str, key_bits: int, value_bits: int) -> KVFormat:
    """K in fp8, or 4 or 3 bits with an fp16 norm; V by minimum and maximum: fp16 scale and zero; even bytes a token."""
    keys = "fp8 keys without rotation" if key_bits == 8 else f"{key_bits}-bit Lloyd-Max keys with norm correction"
    return KVFormat(
        name=f"turboquant_{name}",
        summary=f"TurboQuant: {keys}, {value_bits}-bit values",
        key=Plane(bits=key_bits, head_bytes=0 if key_bits == 8 else 2),
        value=Plane(bits=value_bits, head_bytes=4),
        kind="rotated",
        slot_alignment=2,
    )


def _exl3(key_bits: int, value_bits: int) -> KVFormat:
    summary = f"exllamav3's quantised cache: groups of 32 rotated by H32, K {key_bits} bits, V {value_bits} bits"
    name, key, value = f"exl3_k{key_bits}v{value_bits}", _grouped(key_bits), _grouped(value_bits)
    return KVFormat(name=name, summary=summary, key=key, value=value, kind="rotated")


_FP8 = "e4m3 with an fp32 scale per token and head"
_INT4 = "int4 after a randomised Hadamard, fp32 scale per token and head"
_FORMATS = {
    row.name: row
    for row in (
        _alike("fp16", Plane(bits=16), "IEEE half, as exllamav3 keeps its cache by default", kind="plain"),
        _alike("bf16", Plane(bits=16), "bfloat16, as vLLM keeps its cache by default", kind="plain"),
        _alike("fp32", Plane(bits=32), "float32, where a processor has no fast half precision", kind="plain"),
        _alike("fp8", Plane(bits=8), "e4m3 with one scale a layer"),
        _alike("fp8_e5m2", Plane(bits=8), "e5m2 without scales"),
        _alike("int8_per_token_head", _per_token_head(8), "int8 with an fp32 scale per token and head"),
        _alike("fp8_per_token_head", _per_token_head(8), f"{_FP8}; not below SM 8.9", needs="8.9"),
        _alike("int4_per_token_head", _per_token_head(4), _INT4, kind="rotated"),
        _kvarn(4, 2, 128),
        _kvarn(4, 4, 128),
        _kvarn(4, 2, 64),
        _turboquant("k8v4", 8, 4),
        _turboquant("4bit_nc", 4, 4),
        _turboquant("k3v4_nc", 3, 4),
        _turboquant("3bit_nc", 3, 3),
        _alike("int4_g64", _halves(4), "quanto and HQQ: int4 in groups of 64 with a 16-bit scale and zero point"),
        _alike("int2_g64", _halves(2), "quanto and HQQ: int2 in groups of 64 with a 16-bit scale and zero point"),
        _alike("q8_0", _grouped(8), "llama.cpp: int8 in groups of 32 with an fp16 scale"),
        _alike("q4_0", _grouped(4), "llama.cpp: int4 in groups of 32 with an fp16 scale"),
        _alike("q4_1", _grouped(4, group_bytes=4), "llama.cpp: int4 in groups of 32 with an fp16 scale and minimum"),
        _alike("q5_0", _grouped(5), "llama.cpp: 5 bits in groups of 32 with an fp16 scale"),
        _alike("q5_1", _grouped(5, group_bytes=4), "llama.cpp: 5 bits in groups of 32 with an fp16 scale and minimum"),
        _alike("iq4_nl", _grouped(4), "llama.cpp: 4 bits of an uneven table in groups of 32 with an fp16 scale"),
        *(_exl3(key_bits, value_bits) for key_bits in EXL3_BITS for value_bits in EXL3_BITS),
    )
}

GGML = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Formats that quantise rows of any kind by groups: whole compressed vectors, too."""

_ALSO = {"fp8_e4m3": "fp8", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "f32": "fp32"}


def format_names() -> list[str]:
    """Names of all formats."""
    return sorted(_FORMATS)


def is_exl3(name: str) -> bool:
    """Whether it is one of the many of exllamav3."""
    return name.startswith("exl3_")


def listed(names: Iterable[str]) -> str:
    """Names for a reader: the many of exllamav3 as its first to its last."""
    given = list(names)
    many = [name for name in given if is_exl3(name)]
    named = [f"{many[0]} to {many[-1]}"] if len(many) > 1 else many
    return ", ".join([*(name for name in given if not is_exl3(name)), *named])


def kv_format(name: str) -> KVFormat:
    """The format called `name`, also as an engine calls it, or two as `<of K>/<of V>`; UnknownName otherwise."""
    key, pair, value = name.partition(PAIR)
    if pair:
        return _pair(kv_format(key), kv_format(value))
    name = _ALSO.get(name.lower(), name)
    return _FORMATS.get(name) or _FORMATS[find("KV format", name, _FORMATS, listed=listed(format_names()))]


def _pair(keys: KVFormat, values: KVFormat) -> KVFormat:
    """K in one format and V in another: coded as the one of fewer bits, whose kernels' rates apply."""
    if keys.name == values.name:
        return keys
    fewer = min(keys, values, key=lambda each: each.key.bits)
    return KVFormat(
        name=f"{keys.name}{PAIR}{values.name}",
        summary=f"K in {keys.name}, V in {values.name}",
        key=keys.key,
        value=values.value,
        kind=fewer.kind,
        rated_as=fewer.name,
        min_capability=max(keys.min_capability, values.min_capability),
    )

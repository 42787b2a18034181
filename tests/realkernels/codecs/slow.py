"""Decoders of every layout, written from its description alone: one element after the other, on plain bytes.

They share nothing with realkernels: offsets are spelled out, numbers come from `struct` and numpy, sums are float64.
"""

import struct
from collections.abc import Callable
from math import ceil, sqrt

import numpy as np

Vectors = tuple[list[float], list[float]]
"""K and V of one token and head in the stored basis."""

Raw = dict[str, bytes]
"""Tensors as their bytes."""


def f16(raw: bytes, at: int) -> float:
    return struct.unpack_from("<e", raw, at)[0]


def f32(raw: bytes, at: int) -> float:
    return struct.unpack_from("<f", raw, at)[0]


def u32(raw: bytes, at: int) -> int:
    return struct.unpack_from("<I", raw, at)[0]


def i8(raw: bytes, at: int) -> int:
    return raw[at] - 256 if raw[at] > 127 else raw[at]


def e4m3(code: int) -> float:
    """1 bit sign, 4 exponent (bias 7), 3 mantissa; no infinities, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def stream(raw: bytes, first_byte: int, index: int, bits: int) -> int:
    """Code `index` of a little-endian stream, bit by bit."""
    return sum(
        (raw[first_byte + (index * bits + bit) // 8] >> ((index * bits + bit) % 8) & 1) << bit for bit in range(bits)
    )


def sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


class Place:
    """Where a token of a head lies: `token` counts rows page, token, head; `head` counts rows page, head, token."""

    def __init__(self, *, slot: int, head: int, page_tokens: int, kv_heads: int, head_dim: int) -> None:
        page, offset = divmod(slot, page_tokens)
        self.slot, self.head, self.kv_heads, self.head_dim = slot, head, kv_heads, head_dim
        self.token_row = (page * page_tokens + offset) * kv_heads + head
        self.head_row = (page * kv_heads + head) * page_tokens + offset


def plain(name: str, raw: Raw, place: Place) -> Vectors:
    size = {"fp16": 2, "bf16": 2, "fp32": 4}[name]

    def element(plane: str, d: int) -> float:
        at = (place.token_row * place.head_dim + d) * size
        if name == "bf16":
            return f32(b"\0\0" + raw[plane][at : at + 2], 0)
        return f16(raw[plane], at) if size == 2 else f32(raw[plane], at)

    dims = range(place.head_dim)
    return [element("key_data", d) for d in dims], [element("value_data", d) for d in dims]


def fp8(raw: Raw, place: Place, scales: tuple[float, float]) -> Vectors:
    first = place.token_row * place.head_dim
    keys = [e4m3(raw["key_data"][first + d]) * scales[0] for d in range(place.head_dim)]
    return keys, [e4m3(raw["value_data"][first + d]) * scales[1] for d in range(place.head_dim)]


def per_token_head(name: str, arrangement: str, raw: Raw, place: Place) -> Vectors:
    size = place.head_dim // 2 if name.startswith("int4") else place.head_dim
    vectors = []
    for number, plane in enumerate(("key", "value")):
        if arrangement == "inline":
            codes = scales = raw["token_heads"]
            first = place.head_row * 2 * (size + 4) + number * (size + 4)
            scale_at = first + size
        else:
            codes, scales = raw[f"{plane}_data"], raw[f"{plane}_scale"]
            first, scale_at = place.head_row * size, place.head_row * 4
        scale = scales[scale_at : scale_at + 4]
        vectors.append(_per_token_head_row(name, codes[first : first + size], scale, place.head_dim))
    return vectors[0], vectors[1]


def _per_token_head_row(name: str, codes: bytes, scale: bytes, dims: int) -> list[float]:
    if name.startswith("int8"):
        return [i8(codes, d) * f32(scale, 0) for d in range(dims)]
    if name.startswith("fp8"):
        return [e4m3(codes[d]) * f32(scale, 0) for d in range(dims)]
    word = u32(scale, 0)
    zero, step = word & 0xF, f32(struct.pack("<I", word & 0xFFFFFFF0), 0)
    nibbles = [codes[d // 2] & 15 if d % 2 == 0 else codes[d // 2] >> 4 for d in range(dims)]
    return [(nibble - zero) * step for nibble in nibbles]


def turboquant(name: str, arrangement: str, raw: Raw, place: Place, centroids: list[float]) -> Vectors:
    key_bits, value_bits = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}[
        name.removeprefix("turboquant_")
    ]
    dims, normed = place.head_dim, 0 if key_bits == 8 else 2
    key_size, value_size = dims * key_bits // 8, dims * value_bits // 8
    slot_size = 2 * ceil((key_size + normed + value_size + 4) / 2)
    at = place.token_row * slot_size
    if arrangement == "inline":
        slots = raw["slots"]
        key_codes = value_codes = norms = scales = zeros = slots
        key_at, norm_at, value_at = at, at + key_size, at + key_size + normed
        scale_at, zero_at = value_at + value_size, value_at + value_size + 2
    else:
        row = place.head_row
        key_codes, value_codes = raw["key_data"], raw["value_data"]
        norms, scales, zeros = raw.get("key_norm", b""), raw["value_scale"], raw["value_zero"]
        key_at, value_at, norm_at, scale_at, zero_at = row * key_size, row * value_size, row * 2, row * 2, row * 2
    if key_bits == 8:
        keys = [e4m3(key_codes[key_at + d]) for d in range(dims)]
    else:
        directions = [centroids[stream(key_codes, key_at, d, key_bits)] / sqrt(dims) for d in range(dims)]
        keys = [direction * f16(norms, norm_at) for direction in directions]
    scale, zero = f16(scales, scale_at), f16(zeros, zero_at)
    return keys, [stream(value_codes, value_at, d, value_bits) * scale + zero for d in range(dims)]


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def ggml(name: str, arrangement: str, raw: Raw, place: Place) -> Vectors:
    """Inline blocks of q8_0: d, 32 codes; of q4_0, iq4_nl: d, 16 nibble pairs; of q5_1: d, m, fifth bits, nibbles."""
    block, groups = {"q8_0": 34, "q4_0": 18, "q5_1": 24, "iq4_nl": 18}[name], place.head_dim // 32
    vectors = []
    for plane in ("key", "value"):
        row = []
        for d in range(place.head_dim):
            group, element = divmod(d, 32)
            if arrangement == "inline":
                at = (place.token_row * groups + group) * block
                whole = raw[f"{plane}_blocks"][at : at + block]
            else:
                parts = {"scale": 2, **({"minimum": 2, "fifth": 4} if name == "q5_1" else {})}
                parts["data"] = block - sum(parts.values())
                at = place.head_row * groups + group
                whole = b"".join(raw[f"{plane}_{part}"][at * size : (at + 1) * size] for part, size in parts.items())
            row.append(_ggml_number(name, whole, element))
        vectors.append(row)
    return vectors[0], vectors[1]


def _ggml_number(name: str, block: bytes, element: int) -> float:
    scale, codes = f16(block, 0), block[8:] if name == "q5_1" else block[2:]
    if name == "q8_0":
        return i8(codes, element) * scale
    nibble = codes[element] & 15 if element < 16 else codes[element - 16] >> 4
    if name == "q5_1":
        return (nibble + 16 * (u32(block, 4) >> element & 1)) * scale + f16(block, 2)
    return (IQ4_NL[nibble] if name == "iq4_nl" else nibble - 8) * scale


def exl3(name: str, raw: Raw, place: Place) -> Vectors:
    bits = {"k": int(name[6]), "v": int(name[8])}
    groups = place.kv_heads * place.head_dim // 32
    vectors = []
    for plane, width in bits.items():
        row = []
        for d in range(place.head_dim):
            flat = place.head * place.head_dim + d
            group, element = divmod(flat, 32)
            words_at = (place.slot * groups + group) * width * 4
            words = [u32(raw[f"q{plane}"], words_at + 4 * word) for word in range(width)]
            whole = sum(word << (32 * number) for number, word in enumerate(words))
            code = whole >> (width * element) & (2**width - 1)
            scale = f16(raw[f"s{plane}"], (place.slot * groups + group) * 2)
            row.append(scale * ((2 * code + 1) / 2**width - 1))
        vectors.append(row)
    return vectors[0], vectors[1]


def kvarn(name: str, raw: Raw, place: Place) -> Vectors:
    """Of a quantised tile: K data | K scale, zero, token scale | V data | V channel scale, token scale, zero."""
    value_bits, tokens = int(name[9]), int(name.split("_g")[1])
    dims = place.head_dim
    key_data, value_data = dims * tokens * 4 // 8, dims * tokens * value_bits // 8
    record = key_data + 2 * (2 * dims + tokens) + value_data + 2 * (dims + 2 * tokens)
    tile, token = divmod(place.slot, tokens)
    data = raw["tiles"]
    first = tile * tokens * ceil(record * place.kv_heads / tokens) + place.head * record
    key_scales, values = first + key_data, first + key_data + 2 * (2 * dims + tokens)
    value_scales = values + value_data
    keys, result = [], []
    for d in range(dims):
        byte = data[first + (d * tokens + token) // 2]
        code = byte & 15 if token % 2 == 0 else byte >> 4
        scale, zero = f16(data, key_scales + 2 * d), f16(data, key_scales + 2 * (dims + d))
        keys.append((code * scale + zero) * f16(data, key_scales + 2 * (2 * dims + token)))
        code = stream(data, values, token * dims + d, value_bits)
        scale_at = value_scales + 2 * (dims + token)
        scale, zero = f16(data, scale_at), f16(data, scale_at + 2 * tokens)
        result.append((code * scale + zero) * f16(data, value_scales + 2 * d))
    return keys, result


def decode(
    name: str, arrangement: str, raw: Raw, place: Place, *,
    scales: tuple[float, float] = (1.0, 1.0), centroids: Callable[[int], list[float]] = lambda _: [],
) -> Vectors:  # fmt: skip
    """K and V of one token and head in the stored basis."""
    if name in {"fp16", "bf16", "fp32"}:
        return plain(name, raw, place)
    if name == "fp8":
        return fp8(raw, place, scales)
    if name.endswith("per_token_head"):
        return per_token_head(name, arrangement, raw, place)
    if name.startswith("turboquant"):
        bits = 4 if "4bit" in name else 3
        return turboquant(name, arrangement, raw, place, centroids(bits))
    if name.startswith("exl3"):
        return exl3(name, raw, place)
    return kvarn(name, raw, place) if name.startswith("kvarn") else ggml(name, arrangement, raw, place)

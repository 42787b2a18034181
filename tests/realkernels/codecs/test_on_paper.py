"""Vectors whose codes, scales and zero points can be worked out by hand, byte by byte."""

import struct

import pytest
import torch

from realkernels.codecs import codec_named
from realkernels.codecs.turboquant import unit_centroids
from tests.realkernels.codecs import slow
from tests.realkernels.codecs.kept import CPU, KVARN, planes_for, raw


def one(name: str, key: list[float], dims: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The parts of a token and head whose K (and V) begins with `key` in the model's basis, and K as read."""
    fmt = codec_named(name)
    planes = planes_for(fmt, tokens=1, heads=1, dims=dims)
    rows = torch.zeros(1, 1, dims)
    rows[0, 0, : len(key)] = torch.tensor(key)
    fmt.append(planes, [0], rows, rows)
    return {part: view[0, 0, 0] for part, view in planes.parts.items()}, fmt.restore(planes, [0])[0][0, 0]


TINY = 2.0**-9
Q4_0 = [-8.0, 7.0, 0.0, 1.0, *[0.0] * 12, 3.0, -3.0, 8.0, -1.0, *[0.0] * 12]


@pytest.mark.parametrize(
    ("name", "values", "dims", "parts", "back"),
    [
        # the largest is 127, so the scale is 1; halves go away from zero
        ("int8_per_token_head", [127.0, -127.0, 0.5, -0.5, 1.4999, -1.4999, 2.5, 3.0], 8,
         {"key_data": [127, 129, 1, 255, 1, 255, 3, 3], "key_scale": [1.0]},
         [127.0, -127.0, 1.0, -1.0, 1.0, -1.0, 3.0, 3.0]),
        # 1 is 0 0111 000; 448 is 0 1111 110 and the largest; 17 lies half-way between 16 and 18, ties go to the even
        ("fp8", [1.0, -1.0, 448.0, 1e6, -1e6, 17.0, TINY, float("inf")], 8,
         {"key_data": [0x38, 0xB8, 0x7E, 0x7E, 0xFE, 0x58, 0x01, 0x7E]},
         [1.0, -1.0, 448.0, 448.0, -448.0, 16.0, TINY, 448.0]),
        ("q8_0", [127.0, -127.0, 1.4, -2.6], 32, {"key_data": [127, 129, 1, 253, 0], "key_scale": [1.0]}, []),
        # the largest is -8 (of two as large the first decides), so the scale is 1 and codes are elements plus 8;
        # element 16 shares the byte of element 0
        ("q4_0", Q4_0, 32,
         {"key_data": [0 | 11 << 4, 15 | 5 << 4, 8 | 15 << 4, 9 | 7 << 4, 8 | 8 << 4], "key_scale": [1.0]},
         [*Q4_0[:18], 7.0, *Q4_0[19:]]),
        # the scale is negative where the largest is positive
        ("q4_0", [8.0, -7.0, 1.0], 32, {"key_data": [0 | 8 << 4, 15 | 8 << 4, 7 | 8 << 4], "key_scale": [-1.0]},
         [8.0, -7.0, 1.0, 0.0]),
        # along the first channel a rotated group is constant, at its own scale: the highest code, everywhere
        ("exl3_k3v2", [32.0**0.5], 32, {"key_data": [255] * 12, "value_data": [255] * 8, "key_scale": [1.0]},
         [pytest.approx(32.0**0.5 * 7 / 8, rel=1e-6)]),
        # values of -5 to 10 in 4 bits: scale 1, zero -5
        ("turboquant_k8v4", [-5.0, 10.0, 0.0, 2.2], 16,
         {"value_scale": [1.0], "value_zero": [-5.0], "value_data": [0 | 15 << 4, 5 | 7 << 4, *[5 | 5 << 4] * 6],
          "key_data": [0xCA, 0x52]}, []),
    ],
)  # fmt: skip
def test_codes_scales_and_what_comes_back(
    name: str, values: list[float], dims: int, parts: dict[str, list[float]], back: list[float]
) -> None:
    found, restored = one(name, values, dims)
    for part, expected in parts.items():
        assert found[part].flatten().tolist()[: len(expected)] == expected
    assert restored.tolist()[: len(back)] == back


def test_zeros_have_the_least_scale() -> None:
    for name in ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"):
        parts, back = one(name, [0.0] * 8, 8)
        assert float(parts["value_scale"]) == pytest.approx(1e-6, rel=2e-5)
        assert back.tolist() == [0.0] * 8


def test_int4_on_paper() -> None:
    """A rotated vector of -3 to 12 has the scale 1 and the zero point 3: codes are its elements plus 3."""
    fmt = codec_named("int4_per_token_head")
    rotated = torch.tensor([-3.0, 12.0, 0.0, 5.0, 1.0, -1.0, 7.0, 11.0])
    planes = fmt.allocate(1, 1, 1, 8, CPU)
    rows = fmt.rotate_output(rotated)[None, None]
    fmt.append(planes, [0], rows, rows)
    codes = [0, 15, 3, 8, 4, 2, 10, 14]
    packed = [codes[2 * byte] | codes[2 * byte + 1] << 4 for byte in range(4)]
    scale = struct.pack("<I", struct.unpack("<I", struct.pack("<f", 1.0))[0] | 3)
    assert raw(planes)["token_heads"] == (bytes(packed) + scale) * 2
    assert torch.equal(fmt.restore(planes, [0])[0], rows)


def test_exl3_levels_are_the_middles_of_equal_cells() -> None:
    fmt = codec_named("exl3_k2v2")
    planes = fmt.allocate(1, 1, 1, 32, CPU)
    rotated = torch.tensor([1.0, -1.0, 0.1, -0.1, 0.6, -0.6] + [0.3] * 26)
    rows = fmt.rotate_output(rotated)[None, None]
    fmt.append(planes, [0], rows, rows)
    assert fmt.dequantise(planes, [0])[0][0, 0, :7].tolist() == [0.75, -0.75, 0.25, -0.25, 0.75, -0.75, 0.25]
    codes = [3, 0, 2, 1, 3, 0, 2, 2]
    packed = [sum(codes[4 * byte + at] << 2 * at for at in range(4)) for byte in range(2)]
    assert fmt.views(planes)["key_data"][0, 0, 0, 0, :2].tolist() == packed


@pytest.mark.parametrize(("name", "bits"), [("turboquant_4bit_nc", 4), ("turboquant_3bit_nc", 3)])
def test_turboquant_on_paper(name: str, bits: int) -> None:
    """The first channel rotated is constant, 1 / sqrt(D): one centroid, which the norm correction makes exact."""
    dims = 16
    parts, back = one(name, [3.0], dims)
    table = unit_centroids(bits)
    nearest = min(range(2**bits), key=lambda code: abs(table[code] - 1.0))
    assert [slow.stream(bytes(parts["key_data"].tolist()), 0, d, bits) for d in range(dims)] == [nearest] * dims
    assert float(parts["key_norm"]) == pytest.approx(3.0 / table[nearest], rel=2**-11)
    torch.testing.assert_close(back, torch.tensor([3.0] + [0.0] * 15), rtol=1e-3, atol=1e-6)
    assert float(parts["value_zero"]) == 0.0
    assert float(parts["value_scale"]) == pytest.approx(3.0 / (2**bits - 1), rel=2**-11)
    assert slow.stream(bytes(parts["value_data"].tolist()), 0, 0, bits) == 2**bits - 1


@pytest.mark.parametrize("name", KVARN)
def test_kvarn_on_paper(name: str) -> None:
    """An even tile is not normalised: rotated keys of 0 to 15 along tokens and values along channels are codes."""
    fmt = codec_named(name)
    tile, dims, bits = fmt.tile_tokens, 64, int(name[9])
    planes = fmt.allocate(1, tile, 1, dims, CPU, sinks=())
    tokens, channels = torch.arange(tile, dtype=torch.float32), torch.arange(dims, dtype=torch.float32)
    keys = (tokens % 16)[:, None].expand(tile, dims)
    values = (channels % 2**bits).expand(tile, dims)
    fmt.append(planes, range(tile), fmt.rotate_output(keys)[:, None], fmt.rotate_output(values)[:, None])
    parts = {part: view[0, 0] for part, view in planes.parts.items()}
    assert parts["key_data"].tolist() == [[(2 * j % 16) | (2 * j + 1) % 16 << 4 for j in range(tile // 2)]] * dims
    codes = [int(channel) % 2**bits for channel in range(dims)]
    together = 8 // bits
    packed = [
        sum(codes[together * byte + at] << bits * at for at in range(together)) for byte in range(dims * bits // 8)
    ]
    assert parts["value_data"].tolist() == [packed] * tile
    for part in ("key_scale", "key_token_scale", "value_channel_scale", "value_scale"):
        assert bool((parts[part] == 1).all())
    for part in ("key_zero", "value_zero"):
        assert bool((parts[part] == 0).all())


def test_a_group_of_q5_1_is_quantised_as_the_copy_kernel_does_it() -> None:
    """Codes 0 to 31 between the extremes; the fifth bit of element j is bit j of a word."""
    fmt = codec_named("q5_1")
    planes = fmt.allocate(1, 1, 1, 32, CPU)
    keys = (torch.arange(32) * 0.5 - 3.0).roll(5).view(1, 1, 32)
    fmt.append(planes, [0], keys, torch.full_like(keys, -0.25))
    block, codes = raw(planes)["key_blocks"], [(index - 5) % 32 for index in range(32)]
    assert (slow.f16(block, 0), slow.f16(block, 2)) == (0.5, -3.0)
    assert slow.u32(block, 4) == sum((code >> 4) << index for index, code in enumerate(codes))
    assert list(block[8:]) == [codes[j] % 16 + 16 * (codes[j + 16] % 16) for j in range(16)]
    assert raw(planes)["value_blocks"] == bytes([0, 0, 0x00, 0xB4, *[0] * 20])
    back = fmt.dequantise(planes, [0])
    assert torch.equal(back[0], keys)
    assert bool((back[1] == -0.25).all())


def test_a_group_of_iq4_nl_gets_the_nearest_levels_and_the_scale_of_least_squares() -> None:
    """Codes follow from d = m / -127; of two levels as near it is the upper one."""
    fmt = codec_named("iq4_nl")
    planes = fmt.allocate(1, 1, 1, 32, CPU)
    level = torch.tensor(slow.IQ4_NL, dtype=torch.float32).repeat(2).view(1, 1, 32)
    other = level.clone()
    other[..., 1] = -115.5  # half-way between -127 and -104
    fmt.append(planes, [0], 2 * level, other)
    keys, values = raw(planes)["key_blocks"], raw(planes)["value_blocks"]
    assert slow.f16(keys, 0) == 2.0
    assert list(keys[2:]) == [17 * code for code in range(16)]
    assert values[3] == 0x11
    weighted = [(x * x, v, x) for x, v in zip(other.flatten().tolist(), (2 * slow.IQ4_NL), strict=True)]
    scale = sum(w * v * x for w, v, x in weighted) / sum(w * v * v for w, v, _ in weighted)
    assert slow.f16(values, 0) == pytest.approx(scale, rel=2.0**-11)

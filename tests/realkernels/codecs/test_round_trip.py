"""What comes back: error bounds that the arithmetic of each format gives, in the basis in which it rounds."""

from math import sqrt

import numpy as np
import pytest
import torch

from realkernels.codecs import codec_named
from tests.realkernels.codecs.kept import ALL, CPU, KVARN, ROWS, normal, outliers, planes_for, rotation, stored

FIRST_SIGNS = [1, 1, 1, -1, 1, 1, -1, 1, -1, -1, 1, 1, 1, 1, 1, -1]

FLOAT32 = 1e-5
"""Of the largest element: rotations and divisions in float32 where the truth is in float64."""


def kinds(tokens: int, heads: int, dims: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    keys, values = normal(tokens, heads, dims)
    return {
        "normal": (keys, values),
        "outliers": outliers(tokens, heads, dims),
        "small": (keys * 1e-3, values * 1e-3),
        "large": (keys * 300, values * 300),
        "shifted": (keys + 7, values - 40),
        "zeros": (keys * 0, values * 0),
    }


KINDS = list(kinds(1, 1, 1))


def e4m3_bound(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Half of the spacing: 2^-4 of the element at most, 2^-10 of a scale for the smallest; saturated beyond 448."""
    within = np.maximum(np.abs(x) / 16, scale * 2.0**-10)
    return np.maximum(within, np.abs(x) - 448 * scale)


def half(x: np.ndarray) -> np.ndarray:
    """Largest error of a float16."""
    return np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)


def bounds(name: str, x: np.ndarray, plane: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Largest error of each element of K or V [n, heads, dims], from the scales that were stored."""
    if name in PLAIN:
        return PLAIN[name](x)
    if name == "fp8" or (name == "turboquant_k8v4" and plane == "key"):
        return e4m3_bound(x, 1.0)
    scale = parts[f"{plane}_scale"].astype(np.float64)
    if scale.shape == x.shape[:2]:
        return row_bounds(name, x, scale[..., None])
    return group_bounds(name, x, scale, bits=int(name[6] if plane == "key" else name[8]) if name[0] == "e" else 8)


def row_bounds(name: str, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    if name == "fp8_per_token_head":
        return e4m3_bound(x, scale)
    ends = 0.0
    if name.startswith("turboquant"):  # the zero is rounded to float16, which may cut off that much at either end
        ends = half(x.min(axis=-1, keepdims=True)) + 15 * half(scale)
    return np.broadcast_to(scale / 2 + ends, x.shape)


def group_bounds(name: str, x: np.ndarray, scale: np.ndarray, *, bits: int) -> np.ndarray:
    signed = scale.repeat(32, axis=-1)
    each = np.abs(signed)
    if name.startswith("exl3"):
        largest = np.abs(x).reshape(*scale.shape, 32).max(axis=-1).repeat(32, axis=-1)
        return each / 2**bits + half(largest)
    if name == "q8_0":
        return each / 2 + 127 * half(each)  # a scale that became smaller cuts the largest off
    if name == "q5_1":  # the scale and the minimum are rounded after the codes were found with them
        low = x.reshape(*scale.shape, 32).min(axis=-1).repeat(32, axis=-1)
        return each / 2 + 31 * half(each) + half(low)
    if name == "iq4_nl":  # codes are found with 1 / 127 of the largest; the opposite end of the levels is 14 below it
        first = np.abs(x).reshape(*scale.shape, 32).max(axis=-1).repeat(32, axis=-1) / 127
        return 14 * first + 127 * np.abs(first - each)
    opposite = x / np.where(signed == 0, 1, signed) > 7
    return np.where(opposite, each, each / 2) + 8 * half(each)


PLAIN = {"fp16": half, "bf16": lambda x: np.abs(x) * 2.0**-8, "fp32": np.zeros_like}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "arrangement"), ROWS)
def test_errors_are_within_half_a_step(name: str, arrangement: str, kind: str) -> None:
    tokens, heads, dims = 13, 3, 128
    fmt = codec_named(name, arrangement=arrangement)
    planes = planes_for(fmt, tokens=tokens, heads=heads, dims=dims)
    keys, values = kinds(tokens, heads, dims)[kind]
    fmt.append(planes, range(tokens), keys, values)
    truth, held = stored(name, keys, values), fmt.dequantise(planes, range(tokens))
    page, offset = torch.arange(tokens) // planes.page_tokens, torch.arange(tokens) % planes.page_tokens
    parts = {part: view.transpose(1, 2)[page, offset] for part, view in planes.parts.items()}
    parts = {part: rows.float().numpy() for part, rows in parts.items()}
    for plane, x, got in zip(("key", "value"), truth, held, strict=True):
        if plane == "key" and name.endswith("_nc"):
            continue  # bounded below, by its mean
        error = np.abs(got.double().numpy() - x)
        slack = FLOAT32 * np.abs(x).max(axis=-1, keepdims=True) if name not in PLAIN else 0.0
        assert (error <= bounds(name, x, plane, parts) + slack).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KVARN)
def test_errors_of_tiles_are_within_half_a_step(name: str, kind: str) -> None:
    fmt = codec_named(name)
    tile, heads, dims = fmt.tile_tokens, 2, 64
    planes = fmt.allocate(1, tile, heads, dims, CPU, sinks=())
    keys, values = kinds(tile, heads, dims)[kind]
    fmt.append(planes, range(tile), keys, values)
    truth, held = stored(name, keys, values), fmt.dequantise(planes, range(tile))
    parts = {part: view[0].double().numpy() for part, view in planes.parts.items()}
    steps = {
        "key": (parts["key_scale"][:, None], parts["key_zero"][:, None], parts["key_token_scale"][..., None]),
        "value": (
            parts["value_scale"][..., None], parts["value_zero"][..., None], parts["value_channel_scale"][:, None],
        ),
    }  # fmt: skip
    for plane, x, got in zip(("key", "value"), truth, held, strict=True):
        scale, zero, other = steps[plane]
        error = np.abs(got.double().numpy() - x).transpose(1, 0, 2)
        ends = half(zero) * 2 + 16 * half(scale)
        assert (error <= other * (scale / 2 + ends) + half(x).transpose(1, 0, 2) + FLOAT32 * np.abs(x).max()).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("turboquant_4bit_nc", 0.009497), ("turboquant_3bit_nc", 0.03454), ("turboquant_k3v4_nc", 0.03454)],
)
def test_centroids_lose_the_published_share_of_a_key(name: str, expected: float) -> None:
    """Mean squared error of Lloyd-Max on normal coordinates; the norm correction adds about its square."""
    fmt = codec_named(name)
    keys, values = normal(400, 2, 256)
    planes = planes_for(fmt, tokens=400, heads=2, dims=256)
    fmt.append(planes, range(400), keys * 3, values)
    back = fmt.restore(planes, range(400))[0]
    lost = ((back - keys * 3) ** 2).sum() / ((keys * 3) ** 2).sum()
    assert float(lost) == pytest.approx(expected, rel=0.05)
    torch.testing.assert_close(back.norm(dim=-1), keys.norm(dim=-1) * 3, rtol=2.0**-10, atol=0)


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_a_rotated_query_times_stored_keys_is_the_query_times_keys(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    planes = planes_for(fmt, tokens=40, heads=2, dims=128)
    fmt.append(planes, range(40), *outliers(40, 2, 128))
    query = torch.randn(6, 2, 128, generator=torch.Generator().manual_seed(9))
    (stored_keys, stored_values), (keys, values) = fmt.dequantise(planes, range(40)), fmt.restore(planes, range(40))
    scores = torch.einsum("qhd,nhd->qhn", fmt.rotate_query(query), stored_keys)
    torch.testing.assert_close(scores, torch.einsum("qhd,nhd->qhn", query, keys), rtol=1e-4, atol=1e-3)
    weights = torch.softmax(scores, dim=-1)
    output = fmt.rotate_output(torch.einsum("qhn,nhd->qhd", weights, stored_values))
    torch.testing.assert_close(output, torch.einsum("qhn,nhd->qhd", weights, values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "arrangement"), ALL)
def test_rotations_are_what_they_are_defined_as(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    for_keys, for_values = rotation(name, 128)
    scale = 128 if name.startswith("int4") else 1
    np.testing.assert_allclose(fmt.rotate_query(x), x.numpy() @ for_keys.T / scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fmt.rotate_output(x), x.numpy() @ np.linalg.inv(for_values).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fmt.rotate_back_keys(x), x.numpy() @ np.linalg.inv(for_keys).T, rtol=1e-5, atol=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        assert fmt.rotate_query(x.to(dtype)).dtype == fmt.rotate_output(x.to(dtype)).dtype == dtype


def relative_error(back: torch.Tensor, truth: torch.Tensor) -> float:
    return float((back - truth).norm() / truth.norm())


def plain_int4(rows: torch.Tensor) -> torch.Tensor:
    """Absmax over a token's head, without rotation."""
    scale = rows.abs().amax(dim=-1, keepdim=True) / 7
    return (rows / scale).round().clamp(-8, 7) * scale


@pytest.mark.parametrize("name", ["int4_per_token_head", "kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64"])
def test_keys_with_loud_channels_survive_four_bits(name: str) -> None:
    """A rotation or a scale a channel keeps a few loud channels from costing all the others their bits."""
    fmt = codec_named(name)
    planes = planes_for(fmt, tokens=256, heads=2, dims=256)
    if name.startswith("kvarn"):
        fmt.release(planes, [0])
    keys, values = normal(256, 2, 256)
    keys[..., ::64] = keys[..., ::64] * 10 + 40
    fmt.append(planes, range(256), keys, values)
    back, by_absmax = fmt.restore(planes, range(256))[0], plain_int4(keys)
    assert relative_error(back, keys) < relative_error(by_absmax, keys) / 2


def test_variance_normalisation_saves_loud_tokens_from_one_another() -> None:
    """Keys whose lengths differ a hundredfold: a scale a token keeps the short ones."""
    fmt = codec_named("kvarn_k4v2_g128")
    planes = fmt.allocate(1, 128, 1, 256, CPU, sinks=())
    keys, values = normal(128, 1, 256)
    keys[::4] *= 100
    fmt.append(planes, range(128), keys, values)
    back = fmt.restore(planes, range(128))[0]
    quiet = torch.arange(128) % 4 != 0
    assert relative_error(back[quiet], keys[quiet]) < 0.12


def test_the_signs_are_the_same_everywhere_and_about_even() -> None:
    from realkernels.codecs.arithmetic import fixed_signs

    signs = fixed_signs(256, CPU)
    assert signs[:16].int().tolist() == FIRST_SIGNS
    assert abs(int(signs.sum())) <= 4 * sqrt(256)
    assert torch.equal(fixed_signs(512, CPU)[:256], signs)
    matrix = codec_named("int4_per_token_head").rotate_query(torch.eye(256)).T * 256
    assert torch.equal(matrix @ matrix.T, 256 * torch.eye(256))
    assert torch.equal(matrix[0], signs)

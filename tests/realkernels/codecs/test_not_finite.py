"""NaN and infinity stay with the token, head and plane that brought them, in the way that each format says."""

from math import inf, isnan, nan

import pytest
import torch

from realkernels.codecs import codec_named
from tests.realkernels.codecs.kept import CPU, KVARN, ROWS, normal

ELEMENTWISE = {"fp16", "bf16", "fp32", "fp8"}


def whole(name: str, plane: str) -> slice:
    """What a bad element takes with it, of K at 40 and of V at 3."""
    if codec_named(name).group:
        return slice(32, 64) if plane == "key" else slice(0, 32)
    return slice(None)


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e30])
@pytest.mark.parametrize(("name", "arrangement"), ROWS)
def test_other_tokens_heads_and_planes_are_as_if_nothing_were(name: str, arrangement: str, value: float) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    clean, hurt = (fmt.allocate(1, 6, 2, 128, CPU) for _ in range(2))
    fmt.append(clean, range(6), *normal(6, 2, 128))
    bad_keys, bad_values = normal(6, 2, 128)
    bad_keys[2, 1, 40] = bad_values[4, 0, 3] = value
    fmt.append(hurt, range(6), bad_keys, bad_values)
    (keys, values), (hurt_keys, hurt_values) = fmt.restore(clean, range(6)), fmt.restore(hurt, range(6))
    lost_keys, lost_values = hurt_keys[2, 1, whole(name, "key")], hurt_values[4, 0, whole(name, "value")]
    by_element = name in ELEMENTWISE or name == "turboquant_k8v4"
    held = value == 1e30 and name.endswith("per_token_head")
    if by_element:
        got = float(hurt_keys[2, 1, 40])
        saturating = name not in {"fp16", "bf16", "fp32"}
        as_half = inf if value == 1e30 and name == "fp16" else value
        expected = max(-448.0, min(448.0, value)) if saturating else as_half
        assert isnan(got) if isnan(value) else got == pytest.approx(expected, rel=2.0**-8)
        hurt_keys[2, 1, 40] = keys[2, 1, 40]
    elif not held:
        assert bool(lost_keys.isnan().all())
    if name in ELEMENTWISE:
        hurt_values[4, 0, 3] = values[4, 0, 3]
    elif not held:
        assert bool(lost_values.isnan().all())
    if not by_element:
        lost_keys.copy_(keys[2, 1, whole(name, "key")])
    if name not in ELEMENTWISE:
        lost_values.copy_(values[4, 0, whole(name, "value")])
    assert torch.equal(hurt_keys, keys)
    assert torch.equal(hurt_values, values)


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_a_float32_scale_holds_what_a_half_could_not(name: str) -> None:
    fmt = codec_named(name)
    planes = fmt.allocate(1, 1, 1, 128, CPU)
    keys, values = normal(1, 1, 128)
    fmt.append(planes, [0], keys * 1e20, values * 1e20)
    back = fmt.restore(planes, [0])[0] / 1e20
    assert float((back - keys).norm() / keys.norm()) < 0.15


@pytest.mark.parametrize("value", [nan, inf, 1e30])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", KVARN)
def test_a_bad_token_leaves_the_others_of_its_tile_readable(name: str, value: float, *, checked: bool) -> None:
    """It is NaN itself; the others are within what rounding costs them, and other heads and tiles are untouched."""
    fmt = codec_named(name)
    tile = fmt.tile_tokens
    clean, hurt = (fmt.allocate(1, 2 * tile, 2, 64, CPU, sinks=()) for _ in range(2))
    keys, values = normal(2 * tile, 2, 64)
    fmt.append(clean, range(2 * tile), keys, values, checked=checked)
    bad_keys, bad_values = keys.clone(), values.clone()
    bad_keys[5, 1, 40], bad_values[9, 0, 3] = value, value
    fmt.append(hurt, range(2 * tile), bad_keys, bad_values, checked=checked)
    expected, got = fmt.restore(clean, range(2 * tile)), fmt.restore(hurt, range(2 * tile))
    for plane, token, head in ((0, 5, 1), (1, 9, 0)):
        assert bool(got[plane][token, head].isnan().all())
        assert int(got[plane].isnan().sum()) == 64
        truth = (keys, values)[plane]
        rest = [at for at in range(tile) if at != token]
        before = (expected[plane][rest, head] - truth[rest, head]).norm()
        assert float((got[plane][rest, head] - truth[rest, head]).norm()) < 1.1 * float(before)
        assert torch.equal(got[plane][:, 1 - head], expected[plane][:, 1 - head])
        assert torch.equal(got[plane][tile:], expected[plane][tile:])


@pytest.mark.parametrize("name", KVARN)
def test_a_bad_token_of_an_open_tile_is_kept_by_itself(name: str) -> None:
    fmt = codec_named(name)
    planes = fmt.allocate(1, fmt.tile_tokens, 2, 64, CPU)
    keys, values = normal(3, 2, 64)
    keys[1, 0, 0] = nan
    fmt.append(planes, range(3), keys, values)
    back = fmt.restore(planes, range(3))[0]
    assert bool(back[1, 0].isnan().all())
    assert int(back.isnan().sum()) == 64

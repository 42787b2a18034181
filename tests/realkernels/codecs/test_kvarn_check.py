"""The check of quantised tiles: whatever order sums were taken in passes, whatever is wrong does not."""

import pytest
import torch

from realkernels.codecs import KVarN, Planes, codec_named
from realkernels.codecs import kvarn as tile
from realkernels.timed.append import tile_faults

NAME, TOKENS, HEADS, DIM = "kvarn_k4v2_g64", 192, 2, 64


def the_rows() -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    keys[..., 5] *= 6
    values[100, 1, 3] = torch.nan
    keys[7, 0, 2] = torch.inf
    return keys, values


def a_format() -> KVarN:
    fmt = codec_named(NAME)
    assert isinstance(fmt, KVarN)
    return fmt


def quantised() -> Planes:
    fmt = a_format()
    planes = fmt.allocate(1, 256, HEADS, DIM, torch.device("cpu"), sinks=())
    fmt.append(planes, range(TOKENS), *the_rows())
    return planes


def faults(planes: Planes) -> list[str]:
    return tile_faults(a_format(), planes, range(3), *the_rows())


def test_what_torch_quantises_is_right() -> None:
    assert faults(quantised()) == []


def test_another_order_of_sums_is_right_although_bytes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = quantised()
    monkeypatch.setattr(tile, "folded_sum", lambda x, dim: x.double().sum(dim, keepdim=True).float())
    other = quantised()
    monkeypatch.undo()
    assert not torch.equal(plain.tensors["tiles"], other.tensors["tiles"])
    assert faults(other) == []


SCALES = ("key_scale", "key_zero", "key_token_scale", "value_channel_scale", "value_scale")


@pytest.mark.parametrize("part", [*SCALES, "key_data", "value_data"])
def test_a_scale_that_is_one_per_cent_off_and_shifted_codes_are_found(part: str) -> None:
    planes = quantised()
    rows = planes.parts[part][1]
    rows.copy_((rows.float() * 1.01).half() if part in SCALES else rows ^ 1)
    assert faults(planes)


def test_swapped_tokens_and_swapped_tiles_are_found() -> None:
    keys, values = the_rows()
    keys[[3, 9]] = keys[[9, 3]]
    assert tile_faults(a_format(), quantised(), range(3), keys, values)
    assert tile_faults(a_format(), quantised(), [1, 0, 2], *the_rows())


def test_a_state_of_the_iteration_that_is_less_even_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first state, no normalisation at all, where the last ones are the most even."""
    monkeypatch.setattr(tile, "ITERATIONS", 0)
    planes = quantised()
    monkeypatch.undo()
    assert any("no even state" in fault for fault in faults(planes))

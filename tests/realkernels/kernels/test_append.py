"""What the kernels write is, bit by bit, what torch writes: every format that quantises each token on its own."""

from math import inf, nan

import pytest
import torch

from realkernels.codecs import Codec, Planes, arrangements, codec_named, codec_names
from realkernels.kernels.append import append
from tests.realkernels.codecs.kept import CPU, ROWS, normal, outliers, same_bytes, twins

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of each 0 / 0 that is meant
UNQUANTISED = {"fp16", "bf16", "fp32"}


def appended(fmt: Codec, slots: object, keys: torch.Tensor, values: torch.Tensor, **sizes: int) -> list[Planes]:
    """Planes as torch and as the kernels leave them."""
    pair = twins(fmt, heads=keys.shape[1], dims=keys.shape[2], **sizes)
    fmt.append(pair[0], slots, keys, values)
    append(fmt, pair[1], slots, keys, values)
    return pair


def hard_rows(tokens: int, heads: int, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outliers, zeros, one value alone, ties between codes, the largest and the smallest numbers: one kind a token."""
    keys, values = normal(tokens, heads, dims, seed=5)
    keys[..., 3::13] *= 9
    for rows in (keys, values):
        kinds = (
            torch.zeros(dims), torch.full((dims,), -0.75), torch.eye(dims)[1] * 3, torch.arange(dims) % 31 - 15.5,
            (torch.arange(dims) % 15 - 7) / 7 * 127, torch.full((dims,), 3e38), rows[5 % tokens, 0] * 1e-40,
            rows[6 % tokens, 0] * 1e5, rows[7 % tokens, 0].abs(), -rows[8 % tokens, 0].abs() - 3,
        )  # fmt: skip
        for token, kind in enumerate(kinds[: max(0, tokens - 1)]):
            rows[token, token % heads] = kind
    return keys, values


@pytest.mark.parametrize(("name", "arrangement"), ROWS)
@pytest.mark.parametrize("slots", [[20], [5, 40, 31, 0, 16, 47, 2]])
def test_tokens_in_any_slots(name: str, arrangement: str, slots: list[int]) -> None:
    """And every other byte is left as it is."""
    fmt = codec_named(name, arrangement=arrangement)
    assert same_bytes(*appended(fmt, slots, *outliers(len(slots), 2, 128)))


@pytest.mark.parametrize(("name", "arrangement"), ROWS)
def test_rows_that_are_hard_to_quantise(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    assert same_bytes(*appended(fmt, range(70), *hard_rows(70, 3, 128), pages=5))  # 70 tokens: two blocks


@pytest.mark.parametrize(("name", "arrangement"), ROWS)
def test_what_is_not_finite(name: str, arrangement: str) -> None:
    """One element of K and one of V in each of four tokens; of plain rows any NaN is NaN."""
    fmt, (keys, values) = codec_named(name, arrangement=arrangement), normal(6, 2, 128)
    for token, value in enumerate((nan, -nan, inf, -inf)):
        keys[token, 1, 40] = values[token + 2, 0, 3] = value
    one, other = appended(fmt, range(6), keys, values)
    if name in UNQUANTISED:
        assert bool(other.parts["key_data"].transpose(1, 2)[0, :2, 1, 40].isnan().all())
        for planes in (one, other):
            for plane in ("key_data", "value_data"):
                planes.parts[plane].transpose(1, 2)[0, :6].nan_to_num_(nan=1.5, posinf=inf, neginf=-inf)
    assert same_bytes(one, other)


ODD = {
    "fp16": 7, "fp32": 65, "fp8": 5, "int8_per_token_head": 12, "fp8_per_token_head": 20, "turboquant_k8v4": 48,
    "q8_0": 96, "exl3_k3v5": 96,
}  # fmt: skip
"""Sizes of a head that are no powers of two."""


@pytest.mark.parametrize(
    ("name", "heads", "dims", "dtype"),
    [
        *((name, 1, dims, dtype) for name in sorted({name for name, _ in ROWS})
          for dims, dtype in ((64, torch.float16), (256, torch.bfloat16))),
        *((name, 3, dims, torch.float32) for name, dims in ODD.items()),
        *((name, 2, 64, torch.float32) for name in codec_names() if name.startswith("exl3")),
    ],
)  # fmt: skip
def test_heads_of_other_sizes_rows_of_any_type_and_stride_and_exl3_in_any_two_widths(
    name: str, heads: int, dims: int, dtype: torch.dtype
) -> None:
    """K and V as a model's projection leaves them: side by side in one tensor, heads after tokens."""
    fmt = codec_named(name, arrangement=arrangements(name)[0])
    joined = torch.cat(outliers(5, heads, dims), dim=1).to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    keys, values = joined[:, :heads].requires_grad_(), joined[:, heads:]
    assert same_bytes(*appended(fmt, [4, 33, 8, 9, 10], keys, values, page_tokens=13))


def test_every_float16_number_as_e4m3() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(16, 32, 128)
    fmt = codec_named("fp8")
    pair = twins(fmt, heads=32)
    for planes in pair:
        fmt.set_scales(planes, key=0.5, value=3.0)
    fmt.append(pair[0], range(16), every, every)
    append(fmt, pair[1], range(16), every, every)
    assert same_bytes(*pair)


def test_slots_on_the_device_are_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = codec_named("q8_0")
    one, other = (fmt.allocate(2, 16, 2, 64, CPU) for _ in range(2))
    rows, slots = normal(3, 2, 64), torch.tensor([9, 30, 1])
    append(fmt, one, slots, *rows)
    monkeypatch.setattr("realkernels.codecs.codec._check_slots", lambda *_given, **_named: pytest.fail("read back"))
    append(fmt, other, slots, *rows, checked=False)
    assert same_bytes(one, other)


@pytest.mark.parametrize(
    ("slots", "words"), [([3], "tile 0 is quantised"), ([70, 130, 200], "tile 3 needs a side slot, all 2 hold")]
)
def test_places_that_a_kvarn_cache_does_not_have(slots: list[int], words: str) -> None:
    fmt = codec_named("kvarn_k4v2_g64")
    pair = [fmt.allocate(4, 64, 2, 16, CPU, side_tiles=2, sinks=()) for _ in range(2)]
    for planes in pair:
        fmt.append(planes, range(64), *normal(64, 2, 16))
    with pytest.raises(ValueError, match=words):
        append(fmt, pair[1], slots, *normal(len(slots), 2, 16))
    assert same_bytes(*pair)

"""Bytes of K and V by format: the published counts of two models, sums by hand, and laws for any heads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.worlds import LAWS
from twin.errors import UnknownName
from twin.formats import EXL3_BITS, KVFormat, Plane, format_names, kv_format, listed

PUBLISHED = {
    "fp16": 4096, "bf16": 4096, "fp32": 8192, "fp8": 2048, "fp8_e5m2": 2048,
    "int4_g64": 1152, "int2_g64": 640, "int8_per_token_head": 2080, "fp8_per_token_head": 2080,
    "int4_per_token_head": 1056, "kvarn_k4v2_g128": 840, "kvarn_k4v4_g128": 1096, "kvarn_k4v2_g64": 888,
    "turboquant_k8v4": 1552, "turboquant_4bit_nc": 1048, "turboquant_k3v4_nc": 920, "turboquant_3bit_nc": 792,
    "q8_0": 2176, "q4_0": 1152, "q4_1": 1280, "q5_0": 1408, "q5_1": 1536, "iq4_nl": 1152,
    "exl3_k8v8": 2176, "exl3_k8v4": 1664, "exl3_k4v4": 1152,
}  # fmt: skip
"""Bytes per token and attention layer of Qwen3.8-27B (4 kv heads x 256); of Flash-Next (2 x 256) half of them."""


def bytes_of(name: str, *, kv_heads: int = 4, head_dim: int = 256) -> int:
    return kv_format(name).plane_bytes(kv_heads=kv_heads, head_dim=head_dim)


def custom(*, key: Plane, value: Plane, **other: Any) -> KVFormat:
    return KVFormat(name="custom", summary="made up", key=key, value=value, **({"kind": "scaled"} | other))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_takes_the_published_bytes_in_both_models(name: str) -> None:
    assert bytes_of(name) == 2 * bytes_of(name, kv_heads=2) == PUBLISHED[name]


@pytest.mark.parametrize(("also", "name"), [("fp8_e4m3", "fp8"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_a_format_is_known_by_what_engines_options_call_it(also: str, name: str) -> None:
    assert kv_format(also) is kv_format(name)


def test_k_and_v_of_two_formats_take_the_bytes_of_both_and_the_rates_of_the_one_with_fewer_bits() -> None:
    both = kv_format("q8_0/q4_0")
    assert both.plane_bytes(kv_heads=4, head_dim=256) == (2176 + 1152) // 2
    assert (both.name, both.rated_as, both.kind, both.parts) == ("q8_0/q4_0", "q4_0", "scaled", ("q8_0", "q4_0"))
    assert kv_format("F16/q8-0").name == "fp16/q8_0"
    assert kv_format("q8_0/q8_0") == kv_format("q8_0")
    assert kv_format("q4_0/fp16").rated_as == kv_format("fp16/q4_0").rated_as == "q4_0"
    assert not kv_format("q8_0/q4_0").check(head_dim=64)
    assert "multiples of 32" in kv_format("fp16/q4_0").check(head_dim=48)
    with pytest.raises(UnknownName, match="unknown KV format 'q9'"):
        kv_format("q8_0/q9")


def test_the_many_of_exllamav3_are_named_by_their_ends() -> None:
    assert listed(["fp16", "exl3_k2v2", "exl3_k2v3", "exl3_k8v8"]) == "fp16, exl3_k2v2 to exl3_k8v8"
    assert [listed(names) for names in (["bf16", "fp8"], ["exl3_k4v4"], [])] == ["bf16, fp8", "exl3_k4v4", ""]


BITS = st.sampled_from(EXL3_BITS)


@LAWS
@given(BITS, BITS, st.integers(1, 64), st.integers(1, 32))
def test_exllamav3_keeps_groups_of_32_codes_with_an_fp16_scale(
    key_bits: int, value_bits: int, kv_heads: int, groups: int
) -> None:
    """Of 4 bytes a bit and 2 of scale, for K and for V."""
    found = bytes_of(f"exl3_k{key_bits}v{value_bits}", kv_heads=kv_heads, head_dim=32 * groups)
    assert found == kv_heads * groups * (4 * key_bits + 2 + 4 * value_bits + 2)


@pytest.mark.parametrize(("head_dim", "slot"), [(8, 14), (16, 20), (24, 28), (256, 230)])
def test_a_turboquant_slot_is_rounded_up_to_even_bytes(head_dim: int, slot: int) -> None:
    """3 x dim / 8 + 2 of K and dim / 2 + 4 of V: 13 bytes are 14, 20 stay, 27 are 28, 230 stay."""
    for kv_heads in (1, 3, 4):
        assert bytes_of("turboquant_k3v4_nc", kv_heads=kv_heads, head_dim=head_dim) == kv_heads * slot


def test_slots_and_tiles_are_those_of_k_and_v_together() -> None:
    """Each of them odd: 5 + 5 bytes fill a slot of 10, not two of 6. Tiles of 4 and of 6 tokens meet after 12."""
    odd = custom(key=Plane(bits=8, head_bytes=1), value=Plane(bits=8, head_bytes=1), slot_alignment=2)
    assert odd.plane_bytes(kv_heads=3, head_dim=4) == 3 * 10
    assert replace(odd, slot_alignment=16).plane_bytes(kv_heads=3, head_dim=4) == 3 * 16
    key, value = Plane(bits=8, channel_bytes=2, tile_tokens=4), Plane(bits=8, channel_bytes=3, tile_tokens=6)
    fmt = custom(key=key, value=value)
    assert (fmt.tile_tokens, fmt.plane_bytes(kv_heads=1, head_dim=2)) == (12, -(-(3 * 12 + 2 * 18) // 12))


def test_a_tile_has_a_scale_for_every_group_of_every_token() -> None:
    """2 tokens of 64 elements in groups of 32: 128 bytes of codes, 4 scales of 2."""
    plane = Plane(bits=8, group_elements=32, group_bytes=2, tile_tokens=2)
    assert plane.tile_bytes(64) == 128 + 4 * 2
    assert Plane(bits=8).tile_bytes(64) == 64
    assert Plane(bits=3, head_bytes=2, channel_bytes=4, tile_tokens=8).tile_bytes(5) == 15 + 16 + 20


@pytest.mark.parametrize("name", format_names())
def test_a_format_is_plain_scaled_or_rotated_and_tiled_ones_hold_tokens_back_in_16_bits(name: str) -> None:
    """Keys kept beside a cache have its own elements if it is plain and 16 bits else."""
    fmt = kv_format(name)
    assert (fmt.name, bool(fmt.summary)) == (name, True)
    assert fmt.element_bytes == {"fp32": 4}.get(name, 2)
    rotated = name.startswith(("int4_per", "kvarn", "turboquant", "exl3"))
    assert fmt.kind == ("plain" if name in {"fp16", "bf16", "fp32"} else "rotated" if rotated else "scaled")
    assert (fmt.sidecar_bytes, fmt.tile_tokens > 1) == ((2, True) if name.startswith("kvarn") else (0, False))
    assert fmt.min_capability == {"fp8_per_token_head": "8.9"}.get(name, "")
    assert name in PUBLISHED or name.startswith("exl3_")


@pytest.mark.parametrize(
    ("name", "head_dim", "why"),
    [
        ("exl3_k4v4", 48, "exl3_k4v4 needs head sizes that are multiples of 32, not 48"),
        ("q8_0", 80, "q8_0 needs head sizes that are multiples of 32, not 80"),
        ("q4_0", 1, "q4_0 needs head sizes that are multiples of 32, not 1"),
        ("turboquant_3bit_nc", 100, "turboquant_3bit_nc packs 3-bit codes of a head into whole bytes: 100 do not fill"),
        ("int4_per_token_head", 5, "int4_per_token_head packs 4-bit codes of a head into whole bytes: 5 do not fill"),
        ("kvarn_k4v2_g128", 2, "kvarn_k4v2_g128 packs 2-bit codes of a head into whole bytes: 2 do not fill them"),
    ],
)
def test_heads_that_a_format_cannot_pack_are_refused_with_the_reason(name: str, head_dim: int, why: str) -> None:
    assert kv_format(name).check(head_dim=head_dim).startswith(why)


NAMES = st.sampled_from(format_names())
HEADS = st.integers(1, 64)
DIM = st.integers(1, 16).map(lambda count: 64 * count)


@LAWS
@given(NAMES, HEADS, HEADS, DIM)
def test_a_token_takes_its_codes_and_few_bytes_of_scales_in_proportion_to_heads(
    name: str, few: int, more: int, head_dim: int
) -> None:
    """At most 10 bytes a head and an fp16 number for every 16 elements of both, but for the last byte of a tile."""
    fmt = kv_format(name)
    assert fmt.check(head_dim=head_dim) == ""
    codes = few * head_dim * (fmt.key.bits + fmt.value.bits) / 8
    one, other, both = (bytes_of(name, kv_heads=heads, head_dim=head_dim) for heads in (few, more, few + more))
    assert codes <= one <= codes + few * (10 + head_dim // 8) + 1
    assert one + other - 1 <= both <= one + other
    assert both > max(one, other)


@LAWS
@given(HEADS, DIM)
def test_formats_of_fewer_bits_are_smaller(kv_heads: int, head_dim: int) -> None:
    """Families in falling order of bits, for heads of 32 elements or more."""
    for family in (
        ("fp32", "bf16", "fp8"),
        ("int8_per_token_head", "int4_per_token_head"),
        ("kvarn_k4v4_g128", "kvarn_k4v2_g128"),
        ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        ("bf16", "q8_0", "q4_0"),
        ("exl3_k8v8", "exl3_k8v4", "exl3_k4v4", "exl3_k4v2", "exl3_k2v2"),
    ):
        sizes = [bytes_of(name, kv_heads=kv_heads, head_dim=head_dim) for name in family]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == len(sizes)


@LAWS
@given(NAMES, HEADS, DIM, st.integers(1, 4))
def test_a_slot_only_ever_rounds_up(name: str, kv_heads: int, head_dim: int, power: int) -> None:
    fmt, alignment = kv_format(name), 2**power
    plain = replace(fmt, slot_alignment=1).plane_bytes(kv_heads=kv_heads, head_dim=head_dim)
    aligned = replace(fmt, slot_alignment=alignment).plane_bytes(kv_heads=kv_heads, head_dim=head_dim)
    assert aligned % (kv_heads * alignment) == 0
    assert plain <= aligned < plain + kv_heads * alignment

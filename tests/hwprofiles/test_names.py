"""Usual names of cards stand for the shipped machine that is meant; what is ambiguous stands for none."""

import pytest

from hwprofiles import load_profile, profile_names
from hwprofiles.errors import UnknownName
from hwprofiles.names import USUAL, known_as, several_of

MEANT = {
    "h100": "h100-sxm", "NVIDIA H100": "h100-sxm", "h100 pcie": "h100-pcie", "A100": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb", "a100-pcie": "a100-pcie-80gb", "4090": "rtx4090", "RTX 4090": "rtx4090",
    "geforce-rtx-4090": "rtx4090", "4070 Ti Super": "rtx4070ti-super", "3090ti": "rtx3090ti", "3060": "rtx3060-12gb",
    "m3-max": "m3-max", "Apple M3 Max": "m3-max", "dgx-spark": "gb10", "gb10": "gb10", "rtx-pro-6000": "rtx-pro-6000",
    "rtx6000ada": "rtx-6000-ada", "a6000": "rtx-a6000", "5090 laptop": "rtx5090-laptop",
    "AMD Instinct MI300X": "mi300x", "4x-rtx4090": "4x-rtx4090", "8xH100": "8x-h100-sxm", "2 x 4090": "2x-rtx4090",
    "3x-rtx3090": "3x-rtx3090", "1x-h200": "h200",
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT)
def test_a_usual_name_is_found(name: str) -> None:
    assert load_profile(name).name == MEANT[name]


def test_usual_names_stand_for_what_is_shipped_and_for_none_of_their_own() -> None:
    names = profile_names()
    assert set(USUAL.values()) <= set(names)
    assert not set(USUAL) & set(names)
    assert all(known_as(name, names) == name for name in names)


@pytest.mark.parametrize("name", ["4060ti", "5060ti", "h800", "0x-rtx4090", "x-rtx4090", "2x-", "1000x-rtx4090", "rtx"])
def test_what_is_ambiguous_or_unknown_stands_for_none(name: str) -> None:
    with pytest.raises(UnknownName):
        load_profile(name)


def test_several_of_a_machine_are_as_many_of_its_device() -> None:
    assert several_of("4x-rtx4090") == (4, "rtx4090")
    four, one = load_profile("4x-rtx4090"), load_profile("rtx4090")
    assert (four.gpu_count, four.gpu, four.host) == (4, one.gpu, one.host)

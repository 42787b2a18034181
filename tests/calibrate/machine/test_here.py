"""What `twin machine` makes of a computer: of none, one or several cards, and of a driver that says odd things."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from calibrate.machine import here as module
from calibrate.machine.here import chip_name, here, here_json, here_text, profile_of, read_cards
from hwprofiles import load_profile, profile_names

RTX4090 = "NVIDIA GeForce RTX 4090, 24564, 24100, 570.1, 450.00, 1, 4, 16, 16"
ON_RISER = "NVIDIA GeForce RTX 4090, 24564, 20000, 570.1, 450.00, 1, 3, 4, 16"
Answering = Callable[[str], None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answering:
    """An nvidia-smi of its own, first on the path, that prints a text."""

    def answer(printed: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return answer


def test_one_card_takes_its_shipped_profile_and_says_what_is_otherwise_here(smi: Answering) -> None:
    smi(RTX4090)
    found = here()
    assert found.profile == "rtx4090"
    assert [option.partition(" ")[0] for option in found.options] == ["--ram"]
    text = here_text(found)
    assert "NVIDIA GeForce RTX 4090, 23.99 GiB, 23.54 GiB of it free, PCIe 1.0 x16 now, PCIe 4.0 x16 at best" in text
    assert text.splitlines()[-1].startswith("  ask          twin predict --hw rtx4090 --ram ")


def test_several_cards_are_as_many_of_it_with_the_narrowest_link_and_the_least_free_memory(smi: Answering) -> None:
    smi(f"{RTX4090}\n{ON_RISER}")
    found = here()
    assert found.profile == "2x-rtx4090"
    assert found.options[1:] == ("--pcie gen3x4", "--vram-free 20000MiB")
    assert load_profile(found.profile).with_link(4, 3).with_free_vram(20000 * 2**20).gpu_count == 2


@pytest.mark.parametrize(
    ("told", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960, 40000, 570.1, 400.00, 4, 4, 16, 16", "a100-sxm-40gb"),
        ("NVIDIA H100 80GB HBM3, 81559, 81000, 570.1, 700.00, 5, 5, 16, 16", "h100-sxm"),
        ("NVIDIA GeForce RTX 4060 Ti, 16380, 16000, 570.1, 165.00, 4, 4, 8, 8", "rtx4060ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti, 8188, 8000, 570.1, 165.00, 4, 4, 8, 8", None),
        ("NVIDIA GB10, [N/A], [N/A], 580.95, [N/A], 1, 1, 1, 1", "gb10"),
        ("NVIDIA GeForce RTX 3090, 24576, 24200, 570.1, 350.00, 4, 4, 16, 16", "rtx3090"),
        ("Tesla P40, 24576, 24000, 570.1, 250.00, 3, 3, 16, 16", None),
    ],
)
def test_a_card_is_known_by_its_name_and_its_memory(smi: Answering, told: str, profile: str | None) -> None:
    smi(told)
    found = here()
    assert found.profile == profile
    assert (profile or "none is shipped of it") in here_text(found)
    assert not any(option.startswith(("--pcie", "--vram-free")) for option in found.options)


@pytest.mark.parametrize(
    "printed", ["", "No devices were found", "a, b", "\x00", ",,,,,,,,", RTX4090.replace("4,", "?,")]
)
def test_whatever_the_driver_says_there_is_an_answer(smi: Answering, printed: str) -> None:
    smi(printed)
    found = here()
    assert here_text(found).count("\n") >= 5
    assert here_json(found)["schema"] == "twin.machine/1"


def test_a_driver_that_fails_or_is_not_there_is_no_card(
    smi: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(RTX4090, 9)
    assert read_cards() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    found = here()
    assert (found.cards, found.cpu) == ((), chip_name())
    assert "none that nvidia-smi tells of" in here_text(found)
    assert found.host_bytes > found.host_free_bytes > 0


def test_a_mac_is_known_by_its_chip_and_a_processor_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(module, "output_of", lambda program, *_: "Apple M3 Max" if program == "sysctl" else "")
    monkeypatch.setattr(module, "host_memory", lambda: (64 * 2**30, 40 * 2**30))
    found = here()
    assert (found.cpu, found.profile, found.options) == ("Apple M3 Max", "m3-max", ("--ram 65536MiB",))
    assert load_profile("m3-max").with_ram(2.0**36).gpu.vram.value == 48 * 2**30
    for name in profile_names():
        profile = load_profile(name)
        if profile.gpu.compute_capability == "0.0":
            assert profile_of((), profile.gpu.name) == profile

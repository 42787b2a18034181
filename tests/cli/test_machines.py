"""What is asked about the machine: how many, on which links, with how much memory; and by which name."""

import pytest

from tests.cli.test_answers import asked

Capture = pytest.CaptureFixture[str]


def test_three_of_a_card_are_the_machine_that_is_shipped_as_three(capsys: Capture) -> None:
    told = asked(capsys, "predict", "--hw", "rtx3090", "--gpus", "3")
    assert told["question"].pop("gpus") == 3
    assert told == asked(capsys, "predict", "--hw", "3x-rtx3090") == asked(capsys, "predict", "--hw", "3 x 3090")


def test_a_link_is_named_by_generation_and_width_and_slower_ones_take_longer(capsys: Capture) -> None:
    links = ("x16", "gen4x16", "gen3", "gen3x8", "x4", "gen3x4", "1.0x1")
    told = [asked(capsys, "predict", "--ctx", "200k", "--pcie", link) for link in links]
    named = [(each["question"]["lanes"], each["question"].get("pcie_generation")) for each in told]
    assert named == [(16, None), (16, 4), (16, 3), (8, 3), (4, None), (4, 3), (1, 1)]
    seconds = [each["decode"]["step_s"]["value"] for each in told]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)
    assert seconds[1:] == sorted(seconds[1:])
    assert seconds[-1] > 2 * seconds[0]


def test_a_host_that_nobody_named_is_said_where_it_counts(capsys: Capture) -> None:
    told = "64.00 GiB of host memory are assumed: --ram sets what is there"
    offloaded = ("predict", "--hw", "8x-h100", "--ctx", "100k", "--layout", "offload")
    assert told in asked(capsys, *offloaded)["notes"]
    assert told not in asked(capsys, *offloaded, "--ram", "64GiB")["notes"]
    assert told not in asked(capsys, *offloaded[:-1], "vram")["notes"]
    assert not asked(capsys, "predict", "--ctx", "100k")["notes"][1:]


def test_free_memory_and_host_memory_bound_what_fits(capsys: Capture) -> None:
    question = ("predict", "--hw", "4090", "--model", "llama-3.1-8b", "--ctx", "8k")
    whole = asked(capsys, *question)
    assert whole["question"]["hw"] == "rtx4090"
    assert "vram_free_bytes" not in whole["question"]
    less = asked(capsys, *question, "--vram-free", "22GiB", "--ram", "32GiB")
    assert less["question"]["vram_free_bytes"] == 22 * 2**30
    assert less["question"]["ram_bytes"] == 32 * 2**30
    assert 0 < less["max_ctx_tokens"] < whole["max_ctx_tokens"]
    assert {each["name"]: each["capacity_bytes"] for each in less["memory"]["devices"]}["host"] == 32 * 2**30

"""What is known is listed by name; one of a kind is shown whole, a format with who keeps it."""

import pytest

from hwprofiles import load_profile, profile_names
from twin.cost.roofline import Roofs
from twin.engines import engine_names, load_engine
from twin.formats import format_names, is_exl3, kv_format
from twin.render.catalogue import format_json, format_text, listed


@pytest.mark.parametrize("name", profile_names())
def test_a_machine_shows_every_rate_in_full(name: str) -> None:
    profile = load_profile(name)
    text = listed("profile", name, as_json=False)
    assert "…" not in text
    for key, rate in Roofs(profile).rates.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  {key}  "))
        assert rate.source in line
        assert rate.date in line
        assert " ".join(rate.note.split()) in line


def test_of_devices_of_several_kinds_each_ones_memory_and_rates_are_shown() -> None:
    text = listed("profile", "rtx4070+rtx3060", as_json=False)
    for name in ("rtx4070", "rtx3060-12gb"):
        for key in (f"vram bytes@{name}", *(f"{key}@{name}" for key in Roofs(load_profile(name)).rates)):
            assert f"\n  {key}  " in text
    assert "\n  vram bytes  " not in text


def lines() -> dict[str, str]:
    return {line.split("  ")[1]: line for line in format_text(None).splitlines()[1:-1]}


def rows(name: str) -> dict[str, str]:
    """The rows of one format's table, its heads left out."""
    return {line[2:19].strip(): line[19:] for line in format_text(name).splitlines()[3:]}


def test_a_list_folds_the_many_counts_bytes_and_says_how_to_ask_for_what_no_engine_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2 x 4 x 256 elements: 2 B each; 1 B each and 8 scales of 4 B; half a byte each and 64 scales of 2 B."""
    folded = lines()["exl3_k2v2 to exl3_k8v8"]
    sizes = [each["bytes"] for each in format_json(None) if is_exl3(each["name"])]
    for piece in (f"{min(sizes):,} to {max(sizes):,}", "2, 2 to 8, 8", "2.5 to 8.5", "exllamav3 (vram)"):
        assert piece in folded
    for name, *told in (("bf16", "4,096", "16"), ("fp8_per_token_head", "2,080", "8.125"), ("q4_0", "1,152", "4.5")):
        cells = [cell.strip() for cell in lines()[name].split("  ") if cell.strip()]
        assert cells[2:4] == told
    assert "no engine" not in lines()["fp8"]
    monkeypatch.setattr("twin.render.catalogue.engine_names", lambda: ["exllamav3"])
    assert "no engine: --what-if" in lines()["fp8"]
    assert "no engine" not in lines()["fp16"]


def test_a_format_names_every_engine_and_layout_that_keeps_it_and_no_other() -> None:
    for told in format_json(None):
        kept = {(each["engine"], layout) for each in told["engines"] for layout in each["layouts"]}
        assert kept == {
            (engine, layout)
            for engine in engine_names()
            for layout in load_engine(engine).layouts
            if told["name"] in load_engine(engine).formats_of(layout)
        }


@pytest.mark.parametrize("name", format_names())
def test_one_format_is_shown_whole(name: str) -> None:
    assert format_text(name).startswith(f"{name}: {kv_format(name).summary}\n\n")
    assert format_json(name)["name"] == name
    shown = rows(name)
    assert shown["K"].startswith(f"{kv_format(name).key.bits} bits")
    assert shown["V"].startswith(f"{kv_format(name).value.bits} bits")


def test_scales_and_backends_are_named_where_there_are_any() -> None:
    shown = rows("kvarn_k4v2_g128")
    assert shown["K"] == "4 bits, 2 B for every token and head, 4 B for every channel of 128 tokens"
    assert (shown["quantised"], rows("q4_0")["V"]) == ("128 tokens together", "4 bits, 2 B for every 32 elements")
    assert "vllm: flashinfer, triton" in rows("fp8")["backends"]
    assert "backends" not in rows("exl3_k2v2")

"""What is said of a model: the same figures as text and as JSON, the list of its layers, and its cache by hand."""

import json
import re
from typing import Any

import pytest

from twin.models import model_names
from twin.models.store import understand
from twin.render.model import SUMMARY_SCHEMA, listed, summary_json, summary_text
from twin.units import GIB, KIB, MIB, format_bytes

KEYS = {"name", "layers", "parameters", "weight_bytes", "cache", "ignored_fields", "origins", "schema"}


def told(name: str) -> dict[str, Any]:
    return summary_json(understand(name))


@pytest.mark.parametrize("name", model_names())
def test_text_and_json_say_the_same_of_every_shipped_model(name: str) -> None:
    text, document = summary_text(understand(name)), told(name)
    assert document["schema"] == SUMMARY_SCHEMA
    assert document.keys() >= KEYS
    assert text.startswith(f"{name}: {document['summary']}\n")
    assert f"{document['parameters']['total']:,}" in text
    for part, size in document["weight_bytes"]["parts"].items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {part.replace('_', ' ')} "))
        assert f"{document['parameters']['parts'][part]:,}" in line
        assert line.endswith(format_bytes(size))
        assert document["weights"][part]["format"] in line
    for layer in document["layers"]:
        assert re.search(rf"^  {layer['count']} +{re.escape(layer['mixer'])} .*{layer['feed_forward']}$", text, re.M)
    for tokens, size in document["cache"]["bytes_at"].items():
        assert f"{size / GIB:.3g} GiB at {int(tokens):,}" in text
    for key, value in document["origins"].items():
        assert re.search(rf"^  {re.escape(key)} +{re.escape(value)}$", text, re.M)
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("name", model_names())
def test_parts_add_up_and_the_cache_grows_from_its_fixed_part(name: str) -> None:
    document = told(name)
    parameters, cache = document["parameters"], document["cache"]
    assert sum(parameters["parts"].values()) == pytest.approx(parameters["total"], abs=len(parameters["parts"]))
    assert sum(document["weight_bytes"]["parts"].values()) == document["weight_bytes"]["total"]
    assert 0 < parameters["active"] <= parameters["total"]
    sizes = [cache["fixed_bytes"], *(cache["bytes_at"][tokens] for tokens in ("8192", "32768", "131072"))]
    assert sizes == sorted(sizes)
    assert sizes[1] <= cache["fixed_bytes"] + 8192 * cache["bytes_per_token"]


def test_the_cache_of_full_attention_windows_latents_and_states_is_what_comes_out_by_hand() -> None:
    """Elements of a token in a layer x 2 bytes; a window keeps 128 tokens; a state is there from the first token on."""
    full = told("llama-3.1-8b")["cache"]
    assert full["bytes_per_token"] == 32 * 2 * 8 * 128 * 2 == 128 * KIB
    assert (full["fixed_bytes"], full["bytes_at"]["8192"]) == (0, GIB)
    halves = told("gpt-oss-20b")["cache"]
    one = 2 * 8 * 64 * 2
    assert halves["bytes_per_token"] == 24 * one
    assert halves["bytes_at"]["8192"] == 12 * one * 8192 + 12 * one * 128
    latent = told("deepseek-v3")["cache"]
    assert latent["bytes_per_token"] == 61 * (512 + 64) * 2
    mixed = told("qwen3.5-27b")["cache"]
    assert mixed["bytes_per_token"] == 16 * 2 * 4 * 256 * 2
    states, columns = 48 * 48 * 128 * 128 * 2, 48 * (2 * 16 * 128 + 48 * 128) * 2
    assert states == 72 * MIB
    assert mixed["fixed_bytes"] in (states + 3 * columns, states + 4 * columns)


def test_towers_are_beside_the_language_model_and_a_tied_head_is_no_part() -> None:
    document = told("gemma-4-26b-a4b")
    assert set(document["parameters"]["towers"]) == {"vision"}
    assert "head" not in document["weight_bytes"]["parts"]
    assert "572,792,112 parameters beside them" in summary_text(understand("gemma-4-26b-a4b"))


def test_keys_that_change_nothing_are_named() -> None:
    text = summary_text(understand("phi-4"))
    assert told("phi-4")["ignored_fields"] == ["attention_bias"]
    assert text.endswith("ignored, since they change nothing: attention_bias\n")


def test_other_weights_change_bytes_and_formats_alone() -> None:
    plain, other = (
        json.loads(listed("qwen3-8b", weights=weights, as_json=True, saves=False)) for weights in (None, "fp8")
    )
    changed = {key for key in plain if plain[key] != other[key]}
    assert changed == {"weight_bytes", "weights"}
    assert other["weights"]["attention"] == {"format": "fp8", "bits": 8}
    assert other["weight_bytes"]["parts"]["attention"] * 2 == plain["weight_bytes"]["parts"]["attention"]

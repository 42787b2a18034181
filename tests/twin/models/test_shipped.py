"""Shipped models against what is published of them: parameters by part, bytes when loaded, recurrent state."""

import json

import pytest

from twin.models import ModelSpec, load_model, model_names
from twin.models.assembly import summary_of
from twin.models.mixers import conv_elements
from twin.models.store import DATA, model_summaries
from twin.operations.counts import state_bytes
from twin.units import GIB, MIB

BASE, FAST, INT8 = (load_model(f"qwen3.8-27b{variant}") for variant in ("", "-fast", "-int8-mlp"))
LLAMA, FLASH_NEXT = load_model("llama-3.1-8b"), load_model("qwen3.8-flash-next")
VARIANTS = pytest.mark.parametrize("spec", [BASE, FAST, INT8], ids=lambda spec: spec.name)


@VARIANTS
def test_the_27b_has_26_9_billion_parameters_in_64_layers(spec: ModelSpec) -> None:
    """MLP 267.4M a layer, GDN 115.9M in 48, attention 104.9M in 16, two embeddings of 1.27B."""
    assert spec.parameters["feed_forward"] == 64 * 3 * 5120 * 17_408 == 64 * 267_386_880
    full, delta = (spec.kinds[kind].mixers[0].matrices(5120) for kind in ("attention", "recurrent"))
    assert full == 5120 * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * 5120 == 104_857_600
    gates = 2 * 48
    assert delta == 5120 * (10_240 + 6144 + gates) + 6144 * 5120 + 10_240 * 4 == 115_875_840
    assert spec.parameters["head"] == spec.parameters["embedding"] == 5120 * 248_320
    assert spec.kind_counts == {"recurrent": 48, "attention": 16}
    whole = 64 * 267_386_880 + 48 * 115_875_840 + 16 * 104_857_600 + 2 * 1_271_398_400
    assert sum(spec.parameters.values()) == whole == 26_895_319_040


def test_the_27b_loads_14_26_gib_without_vision_and_keeps_75_mib_of_state_in_16_bits_and_147_in_32() -> None:
    base, int8 = (sum(spec.weight_bytes.values()) for spec in (BASE, INT8))
    assert base / GIB == pytest.approx(14.26, abs=0.005)
    assert base == int8
    for spec, bits in ((BASE, 8.125), (FAST, 4.125), (INT8, 8.125)):
        assert spec.weight_bytes["head"] == 5120 * 248_320 * bits / 8
        states = [count * state_bytes(state, each) / MIB for each in (2, 4) for state, count in spec.states.items()]
        assert states == pytest.approx([74.8, 146.8], abs=0.05)


def test_llama_has_8_03_billion_parameters_two_norms_a_layer_and_no_state() -> None:
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336)
    assert layers == 32 * (41_943_040 + 176_160_768)
    assert LLAMA.parameters["vectors"] == (2 * 32 + 1) * 4096 == 266_240
    whole = layers + 2 * 4096 * 128_256 + 266_240
    assert sum(LLAMA.parameters.values()) == whole == 8_030_261_248
    assert sum(LLAMA.weight_bytes.values()) == 2 * whole
    assert (LLAMA.attention_layers, LLAMA.states) == (32, {})


PUBLISHED = {
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672, "kimi-k2": 1_026_408_235_864,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "mistral-nemo-12b": 12_247_782_400,
    "nemotron-3-nano-30b-a3b": 31_577_937_344, "phi-4": 14_659_507_200, "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "qwen3.5-27b": 27_781_427_952,
    "qwen3.5-35b-a3b": 35_951_822_704,
}  # fmt: skip
"""Parameters that the hub shows of their checkpoints; towers and layers of multi-token prediction are among them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_parameters_that_the_hub_shows(name: str) -> None:
    """Kimi K2 to 3e-8, since its checkpoint holds corrections of its routers; the others to the last one."""
    spec = load_model(name)
    found = sum(spec.parameters.values()) + sum(spec.towers.values())
    assert found == pytest.approx(PUBLISHED[name], rel=3e-8 if name == "kimi-k2" else 0)


def read_names() -> list[str]:
    return [name for name in model_names() if "config" in json.loads((DATA / f"{name}.json").read_text("utf-8"))]


@pytest.mark.parametrize("name", read_names())
def test_a_file_of_somebody_s_config_says_the_line_that_its_reader_makes_and_whose_it_is(name: str) -> None:
    spec = load_model(name)
    assert (spec.name, spec.summary) == (name, summary_of(spec))
    assert spec.source.startswith("config.json of ")


def test_a_list_reads_no_model_and_says_what_the_models_say() -> None:
    assert model_summaries() == {name: load_model(name).summary for name in model_names()}
    assert len(read_names()) >= 20


def test_flash_next_has_125_billion_parameters_beside_its_table_6_of_them_active_and_54_mib_of_state() -> None:
    """Ten experts of 512 and a shared one; gated attention with an indexer; a recurrence with its convolution."""
    table, hidden = FLASH_NEXT.ngram, FLASH_NEXT.hidden
    ((recurrent, layers),) = FLASH_NEXT.states.items()
    assert table is not None
    attention = hidden * 3 * 24 * 256 + hidden * 2 * 512 + hidden * 5 * 128
    assert FLASH_NEXT.parameters["attention"] == 12 * attention + 36 * 57_958_400
    always = hidden * 512 + 3 * hidden * 640
    assert FLASH_NEXT.active_parameters == 5_997_690_880
    assert 12 * attention + 36 * 57_958_400 + 48 * (always + 10 * 3 * hidden * 640) + hidden * 248_320 == 5_997_690_880
    assert sum(FLASH_NEXT.parameters.values()) / 1e9 == pytest.approx(125, abs=0.5)
    assert table.table_bytes == 32_640_183_408
    rows = table.table_bytes // table.row_bytes
    assert rows * 160 / 1e9 == pytest.approx(51.2, abs=0.01)  # rows of 160 elements at 5 bits and a scale
    assert layers * recurrent.state_elements * 2 / MIB == 54
    assert layers * conv_elements(recurrent) * 2 / MIB == pytest.approx(2.1, abs=0.01)

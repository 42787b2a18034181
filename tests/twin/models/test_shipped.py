"""Shipped models against what is published of them: parameters by part, bytes when loaded, recurrent state."""

import pytest

from twin.models import ModelSpec, load_model
from twin.operations import counts
from twin.units import GIB, MIB

BASE, FAST, INT8 = (load_model(f"qwen3.8-27b{variant}") for variant in ("", "-fast", "-int8-mlp"))
LLAMA, FLASH_NEXT = load_model("llama-3.1-8b"), load_model("qwen3.8-flash-next")
VARIANTS = pytest.mark.parametrize("spec", [BASE, FAST, INT8], ids=lambda spec: spec.name)


def in_layers(spec: ModelSpec) -> int:
    return sum(counts.layer_parameters(spec, kind) for kind in spec.layer_kinds)


def loaded_bytes(spec: ModelSpec) -> float:
    return counts.weight_bytes(spec, in_layers(spec)) + counts.head_bytes(spec) + counts.embedding_bytes(spec)


@VARIANTS
def test_the_27b_has_26_9_billion_parameters_in_64_layers(spec: ModelSpec) -> None:
    """MLP 267.4M a layer, GDN 115.9M in 48, attention 104.9M in 16, two embeddings of 1.27B."""
    counted = counts.parameters(spec)
    assert counted.expert == 3 * 5120 * 17_408 == 267_386_880
    assert counted.attention == 5120 * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * 5120 == 104_857_600
    gates = 2 * 48
    assert counted.recurrent == 5120 * (10_240 + 6144 + gates) + 6144 * 5120 + 10_240 * 4 == 115_875_840
    assert counted.head == counted.embedding == 5120 * 248_320
    assert (spec.attention_layers, spec.recurrent_layers) == (16, 48)
    whole = 64 * 267_386_880 + 48 * 115_875_840 + 16 * 104_857_600 + 2 * 1_271_398_400
    assert in_layers(spec) + counted.head + counted.embedding == whole == 26_895_319_040


def test_the_27b_loads_14_26_gib_without_vision_and_keeps_75_mib_of_state_in_16_bits_and_147_in_32() -> None:
    assert loaded_bytes(BASE) / GIB == pytest.approx(14.26, abs=0.005)
    assert loaded_bytes(INT8) == loaded_bytes(BASE)
    for spec in (BASE, FAST, INT8):
        states = [spec.recurrent_layers * counts.state_bytes(spec, each) / MIB for each in (2, 4)]
        assert states == pytest.approx([74.8, 146.8], abs=0.05)


def test_llama_has_8_03_billion_parameters_and_no_state() -> None:
    counted = counts.parameters(LLAMA)
    assert counted.attention == 4096 * (4096 + 2 * 1024) + 4096 * 4096
    assert counted.expert == 3 * 4096 * 14_336
    assert counted.recurrent == counted.always_on == 0
    whole = in_layers(LLAMA) + counted.head + counted.embedding
    assert whole == 32 * (41_943_040 + 176_160_768) + 2 * 4096 * 128_256
    assert whole / 1e9 == pytest.approx(8.03, abs=0.005)
    assert loaded_bytes(LLAMA) == 2 * whole
    assert (LLAMA.attention_layers, LLAMA.recurrent_layers, LLAMA.recurrent) == (32, 0, None)


def test_flash_next_has_125_billion_parameters_beside_its_table_and_54_mib_of_state() -> None:
    counted, table, recurrent = counts.parameters(FLASH_NEXT), FLASH_NEXT.ngram, FLASH_NEXT.recurrent
    assert table is not None
    assert recurrent is not None
    assert (in_layers(FLASH_NEXT) + counted.head + counted.embedding) / 1e9 == pytest.approx(125, abs=0.5)
    assert table.table_bytes == 32_640_183_408
    rows = table.table_bytes // table.row_bytes
    assert rows * 160 / 1e9 == pytest.approx(51.2, abs=0.01)  # rows of 160 elements at 5 bits and a scale
    assert 36 * recurrent.state_elements * 2 / MIB == 54
    assert 36 * recurrent.conv_elements * 2 / MIB == pytest.approx(2.1, abs=0.01)

"""Dense decoders: parameters to the unit as transformers' classes have them, windows, tied heads, shared names."""

from typing import Any

import pytest

from tests.twin.models.config.sums import name_of, row, rows_of, spec_of
from twin.models.config.dense import READERS
from twin.models.mixers import Attention


def windows(config: dict[str, Any], **changes: Any) -> list[int]:
    """The window of each layer."""
    spec = spec_of(config, **changes)
    return [
        mixer.window for kind in spec.layer_kinds for mixer in spec.kinds[kind].mixers if isinstance(mixer, Attention)
    ]


@pytest.mark.parametrize(("config", "parameters"), rows_of(READERS), ids=name_of)
def test_parameters_are_those_of_the_class(config: dict[str, Any], parameters: int) -> None:
    spec = spec_of(config)
    assert sum(spec.parameters.values()) == parameters
    assert spec_of(config, architectures=None).parameters == spec.parameters, "model_type alone says the same"


def test_llama_3_1_8b_and_70b_have_the_published_number_of_parameters() -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
    }
    llama |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    llama |= {"max_position_embeddings": 131_072, "torch_dtype": "bfloat16"}
    assert sum(spec_of(llama).parameters.values()) == 8_030_261_248
    larger = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
    assert sum(spec_of(llama, **larger).parameters.values()) == 70_553_706_496
    assert spec_of(llama).summary == "8.03B dense, full attention"


def test_internlm2_7b_and_baichuan2_7b_have_the_published_number_of_parameters() -> None:
    """Neither has a class in transformers: one is Llama with a bias by its own key, the other is Llama."""
    common = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False}
    internlm = common | {"architectures": ["InternLM2ForCausalLM"], "intermediate_size": 14_336, "vocab_size": 92_544}
    internlm |= {"bias": False, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
    assert sum(spec_of(internlm).parameters.values()) == 7_737_708_544
    baichuan = common | {"architectures": ["BaichuanForCausalLM"], "intermediate_size": 11_008, "vocab_size": 125_696}
    assert sum(spec_of(baichuan, model_max_length=4096).parameters.values()) == 7_505_973_248


def test_a_layer_that_predicts_is_no_part_of_the_language_model() -> None:
    """MiMo-7B: the published 7,833,409,536 less the model's 7,622,619,136."""
    mimo = {
        "architectures": ["MiMoForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
    }
    mimo |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_680}
    spec = spec_of(mimo, max_position_embeddings=32_768, num_nextn_predict_layers=1, attention_bias=True)
    assert sum(spec.parameters.values()) == 7_622_619_136
    assert spec.towers == {"mtp": 210_790_400}


def test_a_tied_head_is_counted_once() -> None:
    config = row("LlamaForCausalLM")
    apart, tied = spec_of(config), spec_of(config, tie_word_embeddings=True)
    assert (
        sum(apart.parameters.values()) - sum(tied.parameters.values()) == config["hidden_size"] * config["vocab_size"]
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MistralForCausalLM", {}, [64] * 5),
        ("Qwen2ForCausalLM", {}, [0, 0, 0, 64, 64]),
        ("Qwen2ForCausalLM", {"use_sliding_window": False}, [0] * 5),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 32}, [0, 0, 0, 32, 0]),
        ("Olmo3ForCausalLM", {}, [64, 64, 64, 0, 64]),
        ("Cohere2ForCausalLM", {"sliding_window_pattern": 2}, [64, 0, 64, 0, 64]),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLG"}, [64, 64, 0, 64, 64]),
        ("CwmForCausalLM", {}, [0, 64, 64, 64, 0]),
        ("Phi3ForCausalLM", {"sliding_window": 1024}, [0] * 5),  # longer than the context
        ("LlamaForCausalLM", {}, [0] * 5),
    ],
)
def test_windows_are_in_the_layers_that_the_file_or_the_class_says(
    architecture: str, changes: dict[str, Any], expected: list[int]
) -> None:
    assert windows(row(architecture), **changes) == expected


def test_layer_types_come_before_a_pattern() -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(row("Cohere2ForCausalLM"), layer_types=types) == [0, 64, 0, 0, 64]


def test_a_null_window_means_full_attention_and_a_missing_one_the_default_of_the_class() -> None:
    config = row("MistralForCausalLM") | {"max_position_embeddings": 32_768}
    assert windows(config, sliding_window=None) == [4096] * 5
    config["sliding_window"] = None
    read = spec_of(config | {"sliding_window": 0})
    assert read.attention is not None
    assert read.attention.reach == 0

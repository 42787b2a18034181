"""Mixtures of experts: parameters to the unit, active ones, which layers have an MLP instead, contradictions."""

from typing import Any

import pytest

from tests.twin.models.config.sums import name_of, row, rows_of, spec_of
from twin.errors import BadFile
from twin.models.config.moe import READERS
from twin.models.mixers import Attention


@pytest.mark.parametrize(("config", "parameters"), rows_of(READERS), ids=name_of)
def test_parameters_are_those_of_the_class(config: dict[str, Any], parameters: int) -> None:
    assert sum(spec_of(config).parameters.values()) == parameters


def test_a_token_runs_through_its_experts_alone() -> None:
    config = row("MixtralForCausalLM")
    spec, dense = spec_of(config), spec_of(config, num_local_experts=2, num_experts_per_tok=2)
    router = config["hidden_size"] * (config["num_local_experts"] - 2) * config["num_hidden_layers"]
    assert spec.active_parameters == dense.active_parameters + router


def test_layers_with_an_mlp_are_where_the_file_says() -> None:
    spec = spec_of(row("Qwen3MoeForCausalLM"), mlp_only_layers=[1], decoder_sparse_step=2)
    assert spec.layer_kinds == ("full_dense", "full_dense", "full_dense", "full_moe", "full_dense")
    spec = spec_of(row("ExaoneMoeForCausalLM"), mlp_layer_types=["dense", "sparse", "sparse", "sparse", "dense"])
    assert [kind.endswith("dense") for kind in spec.layer_kinds] == [True, False, False, False, True]


def test_gpt_oss_alternates_windows_and_keeps_a_sink_a_head() -> None:
    config = row("GptOssForCausalLM")
    spec = spec_of(config)
    assert spec.layer_kinds[:2] == ("sliding", "full")
    sliding = spec.kinds["sliding"].mixers[0]
    assert isinstance(sliding, Attention)
    assert sliding.window == config["sliding_window"]


def test_dbrx_has_the_published_number_of_parameters() -> None:
    dbrx = {
        "architectures": ["DbrxForCausalLM"],
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32_768,
        "vocab_size": 100_352,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
    }
    assert sum(spec_of(dbrx).parameters.values()) == 131_596_523_520


def test_checkpoints_have_their_published_number_of_elements() -> None:
    """dots.llm1, Ling mini 2.0 (no class in transformers), GLM-4.5 Air (its last layer has both ends, too).

    They hold a bias of each router, too, which is a buffer of the class.
    """
    dots = {
        "architectures": ["Dots1ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 62, "vocab_size": 152_064,
        "intermediate_size": 10_944, "num_attention_heads": 32, "num_key_value_heads": 32, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "max_position_embeddings": 32_768,
    }  # fmt: skip
    assert sum(spec_of(dots).parameters.values()) + 61 * 128 == 142_774_381_696
    ling = {
        "architectures": ["BailingMoeV2ForCausalLM"], "num_hidden_layers": 20, "hidden_size": 2048, "num_experts": 256,
        "intermediate_size": 5120, "first_k_dense_replace": 1, "moe_intermediate_size": 512, "num_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_router_enable_expert_bias": True, "num_attention_heads": 16, "head_dim": 128,
        "num_key_value_heads": 4, "use_qk_norm": True, "vocab_size": 157_184, "max_position_embeddings": 32_768,
    }  # fmt: skip
    assert sum(spec_of(ling).parameters.values()) + 19 * 256 == 16_255_643_392
    air = {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 10_944, "max_position_embeddings": 131_072, "n_shared_experts": 1,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_attention_heads": 96, "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "vocab_size": 151_552,
    }  # fmt: skip
    spec = spec_of(air)
    ends = spec.parameters["embedding"] + spec.parameters["head"]
    assert sum(spec.parameters.values()) + spec.towers["mtp"] + ends + 46 * 128 == 110_468_824_832


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 and num_local_experts 4 contradict"),
        (
            "Glm4MoeForCausalLM",
            {"first_k_dense_replace": 9},
            "first_k_dense_replace 9 and num_hidden_layers 5 contradict",
        ),
        (
            "ExaoneMoeForCausalLM",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types .* and num_hidden_layers 5 contradict each other: a list of 1 for 5 layers",
        ),
        ("ExaoneMoeForCausalLM", {"mlp_layer_types": ["thin"] * 5}, "mlp_layer_types: has 'thin', which is not known"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "names linear attention"),
        ("MixtralForCausalLM", {"num_local_experts": 10**6}, "num_local_experts: is 1000000, outside the range"),
        (
            "DbrxForCausalLM",
            {"ffn_config": {"moe_num_experts": 2, "moe_top_k": 3, "ffn_hidden_size": 8}},
            "ffn_config.moe_top_k 3 and",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_keys(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadFile, match=message):
        spec_of(row(architecture), **changes)

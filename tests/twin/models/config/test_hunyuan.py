"""HunYuan: parameters to the unit, lists by layer, and layers that read the keys and values of another."""

from typing import Any

import pytest

from tests.twin.models.config.sums import name_of, row, rows_of, spec_of
from twin.errors import BadFile
from twin.models.config.hunyuan import READERS


@pytest.mark.parametrize(("config", "parameters"), rows_of(READERS), ids=name_of)
def test_parameters_are_those_of_the_class(config: dict[str, Any], parameters: int) -> None:
    assert sum(spec_of(config).parameters.values()) == parameters


def test_layers_that_share_keys_and_values_have_neither_matrices_nor_a_cache_for_them() -> None:
    config = row("HunYuanDenseV1ForCausalLM")
    alone, shared = spec_of(config), spec_of(config, use_cla=True, cla_share_factor=2)
    assert shared.layer_kinds == ("full", "full_shared", "full", "full_shared", "full")
    assert shared.attention_layers == 3
    without = 2 * config["hidden_size"] * 2 * config["num_key_value_heads"] * config["head_dim"]
    assert sum(alone.parameters.values()) - sum(shared.parameters.values()) == without


def test_a13b_has_about_80_billion_parameters_of_which_13_run() -> None:
    a13b = {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "vocab_size": 128_167,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "moe_intermediate_size": [3072] * 32,
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "num_shared_expert": [1] * 32,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    }
    spec = spec_of(a13b)
    assert sum(spec.parameters.values()) == 80_393_183_232
    assert spec.active_parameters / 1e9 == pytest.approx(13, abs=0.6)


def test_a_list_of_another_length_than_the_layers_is_refused() -> None:
    with pytest.raises(
        BadFile, match=r"moe_topk .* and num_hidden_layers 5 contradict each other: a list of 2 for 5 layers"
    ):
        spec_of(row("HunYuanMoEV1ForCausalLM"), moe_topk=[1, 1])
    with pytest.raises(BadFile, match=r"moe_topk .* and num_experts .* contradict"):
        spec_of(row("HunYuanMoEV1ForCausalLM"), moe_topk=[1, 1, 9, 1, 1])

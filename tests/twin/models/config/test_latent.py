"""Latent attention and its kin: parameters to the unit, what is cached, and what contradicts."""

import pytest

from tests.twin.models.config.counted import Counted, cached, counted, kept, one, spec, total
from twin.errors import BadFile
from twin.models.mixers import KimiDelta, LatentAttention, conv_elements

WORDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize("row", counted("latent"), ids=lambda row: row.name)
def test_parameters_are_those_of_the_class(row: Counted) -> None:
    assert total(row.config) == row.parameters


@pytest.mark.parametrize("row", cached("latent"), ids=lambda row: row.name)
def test_each_layer_keeps_what_that_of_the_class_does(row: Counted) -> None:
    assert kept(row.config) == row.cache


def test_one_compressed_vector_and_one_roped_key_of_a_token_are_cached() -> None:
    model = spec(one("latent", "dsv3"))
    assert isinstance(model.attention, LatentAttention)
    assert (model.attention.kv_elements, model.attention_layers) == (32 + 8, 5)


def test_an_indexer_keeps_one_key_a_token_and_weighs_its_heads() -> None:
    indexer = spec(one("latent", "dsv32")).indexer
    assert indexer is not None
    assert (indexer.ratio, indexer.weighted, indexer.head_dim, indexer.threshold_tokens) == (1, True, 12, 64)


@pytest.mark.parametrize(
    "pattern", [{}, {"index_topk_pattern": "FFSFS"}, {"indexer_types": ["full", "full", "shared", "full", "shared"]}]
)
def test_some_layers_attend_to_what_an_earlier_one_chose(pattern: dict[str, object]) -> None:
    model = spec(one("latent", "glm52", **pattern))
    mixers = [model.kinds[kind].mixers[0] for kind in model.layer_kinds]
    chosen = [isinstance(mixer, LatentAttention) and mixer.indexer and mixer.indexer.shared for mixer in mixers]
    assert chosen == [False, False, True, False, True]


def test_a_delta_layer_keeps_a_state_a_head_and_the_tail_of_three_convolutions() -> None:
    (mixer, count), *_ = spec(one("latent", "kimilinear")).states.items()
    assert isinstance(mixer, KimiDelta)
    assert (count, mixer.state_elements, conv_elements(mixer)) == (4, 6 * 10 * 10, 3 * 6 * 10 * 3)


def test_kimi_linear_lists_its_layers_by_number_or_by_kind() -> None:
    numbers = one("latent", "kimilinear")
    sizes = {"linear_num_heads": 6, "linear_head_dim": 10, "linear_conv_kernel_dim": 4}
    words = one("latent", "kimilinear", linear_attn_config=None, layer_types=WORDS, **sizes)
    assert spec(words).kinds == spec(numbers).kinds
    assert spec(words).layer_kinds == spec(numbers).layer_kinds


def test_no_shared_expert_where_the_file_says_null() -> None:
    config = one("latent", "dsv3") | {"n_shared_experts": None}
    assert total(one("latent", "dsv3")) - total(config) == 3 * 3 * 64 * 24


def test_a_head_for_one_more_token_is_a_layer_and_what_joins_it_to_the_embedding() -> None:
    one_more, none = spec(one("latent", "dsv3")), spec(one("latent", "dsv3", num_nextn_predict_layers=0))
    layer = one_more.kinds[one_more.layer_kinds[-1]]
    assert one_more.towers == {"mtp": sum(layer.parameters(64).values()) + 2 * 64 * 64 + 3 * 64}
    assert none.towers == {}
    assert none.parameters == one_more.parameters


def test_experts_in_every_second_layer_and_none_at_all() -> None:
    second = spec(one("latent", "dsv3", first_k_dense_replace=1, moe_layer_freq=2))
    assert second.layer_kinds == ("latent_dense", "latent_dense", "latent_moe", "latent_dense", "latent_moe")
    assert spec(one("latent", "dsv3", n_routed_experts=None)).layer_kinds == ("latent",) * 5


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("dsv3", {"qk_head_dim": 99}, "qk_head_dim 99 and qk_rope_head_dim 8 and qk_nope_head_dim 16 contradict"),
        ("dsv3", {"first_k_dense_replace": None}, "first_k_dense_replace is missing"),
        ("dsv3", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 and n_routed_experts 8 contradict"),
        ("glm4lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types .* and num_hidden_layers 5 contradict"),
        ("glm4lite", {"mlp_layer_types": ["dense"] * 4 + ["odd"]}, "mlp_layer_types: has 'odd', which is not known"),
        ("glm52", {"index_topk_pattern": "FS"}, "index_topk_pattern 'FS' and num_hidden_layers 5 contradict"),
        ("glm52", {"index_topk_pattern": "SSSSS"}, "index_topk_pattern: begins with a layer that shares"),
        ("kimilinear", {"num_hidden_layers": 6}, "full_attn_layers .* and linear_attn_config.kda_layers .* contradict"),
        ("kimilinear", {"linear_attn_config": None}, "linear_num_heads is missing"),
        ("kimilinear", {"layer_types": ["full_attention"] * 5}, "layer_types .* and linear_attn_config .* contradict"),
        ("dsv3", {"n_shared_experts": None}, "n_shared_experts or num_shared_experts is missing"),
    ],
)
def test_what_contradicts_is_refused_by_name(name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        spec(one("latent", name, **changes))

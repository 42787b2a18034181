"""Bits of an element by part, scales and zeros included, as each method of quantisation stores them."""

from typing import Any

import pytest

from tests.twin.models.config.sums import row, spec_of
from twin.errors import BadFile
from twin.models.spec import ModelSpec, Part, Stored

LLAMA = row("LlamaForCausalLM") | {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIXTURE = row("Qwen3MoeForCausalLM")


def quantised(config: dict[str, Any], **table: Any) -> ModelSpec:
    return spec_of(config, torch_dtype="bfloat16", quantization_config=table)


def stored(spec: ModelSpec, part: Part) -> tuple[str, float]:
    found = spec.weights.stored(part)
    return found.format, found.bits


GROUP: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed(weights: dict[str, Any], **table: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]} | table


METHODS: list[tuple[dict[str, Any], str, float]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "w4a16", 4 + 20 / 128),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, "w4a16", 4 + 20 / 32),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "w8a16", 8 + 24 / 128),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, "w4a16", 4 + 20 / 128),
    (compressed(GROUP), "w4a16", 4 + 16 / 128),
    (compressed(GROUP | {"symmetric": False, "group_size": 32}), "w4a16", 4 + 20 / 32),
    (compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}), "nvfp4", 4.5),
    (compressed({"num_bits": 4, "type": "float", "group_size": 32}, format="mxfp4-pack-quantized"), "mxfp4", 4.25),
    (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}), "fp8", 8),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8 + 32 / 128**2),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 8),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4", 4.5),
    ({"quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}, "fp8", 8),
    ({"quantization": {"quant_algo": "W4A16_AWQ", "exclude_modules": ["lm_head"]}}, "w4a16", 4 + 16 / 128),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4", 4.5),
    (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        "nf4",
        4 + 8 / 64 + 32 / (64 * 256),
    ),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, "w4a16", 4.5),
    (
        {"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 64}},
        "w4a16",
        4.5,
    ),
    (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}},
        },
        "w4a16",
        5,
    ),
    ({"quant_method": "exl3", "bits": 4.0, "head_bits": 6}, "exl3", 4),
    ({"bits": 4, "group_size": 64, "mode": "affine"}, "mlx", 4.5),
    ({"bits": 4, "group_size": 128, "desc_act": False, "damp_percent": 0.01}, "w4a16", 4 + 20 / 128),
]


@pytest.mark.parametrize(("table", "form", "bits"), METHODS, ids=[f"{row[1]}-{row[2]:.3f}" for row in METHODS])
def test_bits_include_scales_and_zeros(table: dict[str, Any], form: str, bits: float) -> None:
    spec = quantised(LLAMA, **table)
    for part in ("attention", "feed_forward"):
        assert stored(spec, part) == (form, pytest.approx(bits)), part
    assert stored(spec, "vectors") == ("bf16", 16)
    kept = {"exl3": ("exl3", 6), "mlx": ("mlx", 4.5)}.get(form, ("bf16", 16))
    assert stored(spec, "head") == kept
    assert stored(spec, "embedding") == (("mlx", 4.5) if form == "mlx" else ("bf16", 16))


@pytest.mark.parametrize(
    ("table", "scale_bits"),
    [
        ({"quant_method": "fbgemm_fp8"}, 32),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 32),
        (compressed({"num_bits": 8, "type": "float", "strategy": "channel"}), 16),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, 16),
    ],
)
def test_a_scale_for_a_row_is_divided_among_its_elements(table: dict[str, Any], scale_bits: int) -> None:
    """The MLP has two matrices of rows of 4096 and one of rows of 8192, all of the same size."""
    spec = quantised(LLAMA, **table)
    assert stored(spec, "attention")[1] == pytest.approx(8 + scale_bits / 4096)
    assert stored(spec, "feed_forward")[1] == pytest.approx(8 + scale_bits * (2 / 4096 + 1 / 8192) / 3)


def test_whole_numbers_with_whole_operands_are_int8() -> None:
    table = compressed({"num_bits": 8, "type": "int", "strategy": "channel"})
    table["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    assert quantised(LLAMA, **table).weights.format == "int8"
    del table["config_groups"]["group_0"]["input_activations"]
    assert quantised(LLAMA, **table).weights.format == "w8a16"


def test_mxfp4_of_gpt_oss_takes_experts_alone() -> None:
    spec = quantised(row("GptOssForCausalLM"), quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    assert (spec.weights.format, spec.weights.bits) == ("mxfp4", 4.25)
    for part in ("attention", "router", "embedding", "head", "vectors"):
        assert stored(spec, part) == ("bf16", 16), part


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "re:.*self_attn.*"],
        ["lm_head", "model.layers.*.self_attn"],
        ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(5))],
        [
            "lm_head",
            *(f"model.language_model.layers.{layer}.self_attn.{each}_proj" for layer in range(5) for each in "qkvo"),
        ],
        ["self_attn"],
    ],
    ids=["expression", "glob", "beginnings", "names", "kind"],
)
def test_a_list_of_ignored_modules_is_honoured_by_part(ignore: list[str]) -> None:
    spec = quantised(MIXTURE, quant_method="modelopt", quant_algo="NVFP4", ignore=ignore)
    assert stored(spec, "attention") == ("bf16", 16)
    assert stored(spec, "experts") == ("nvfp4", 4.5)
    assert spec.weights.format == "nvfp4"


def test_a_part_that_is_ignored_in_some_layers_has_the_mean() -> None:
    ignore = ["model.layers.0.mlp.experts", "model.layers.1.mlp"]
    spec = quantised(MIXTURE, quant_method="fp8", modules_to_not_convert=ignore)
    assert stored(spec, "experts") == ("fp8", pytest.approx((3 * 8 + 2 * 16) / 5))
    assert stored(spec, "attention") == ("fp8", 8)


def test_the_first_layer_is_not_meant_where_the_tenth_is() -> None:
    deep = spec_of(
        LLAMA, num_hidden_layers=12, quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["layers.1"]}
    )
    assert deep.weights.stored("feed_forward").bits == pytest.approx((11 * 8 + 16) / 12)


def test_modelopt_may_give_every_module_an_algorithm_of_its_own() -> None:
    layers = range(MIXTURE["num_hidden_layers"])
    table: dict[str, Any] = {f"model.layers.{layer}.self_attn": {"quant_algo": "FP8"} for layer in layers}
    table |= {f"model.layers.{layer}.mlp.experts": {"quant_algo": "W4A16_NVFP4"} for layer in layers}
    spec = quantised(MIXTURE, quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=table)
    assert stored(spec, "attention") == ("fp8", 8)
    assert stored(spec, "experts") == ("nvfp4", 4.5)
    assert stored(spec, "head") == ("bf16", 16)


def test_groups_with_names_come_before_the_group_of_all_linear_modules() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    }
    spec = quantised(MIXTURE, quant_method="compressed-tensors", config_groups=groups, ignore=["lm_head"])
    assert (stored(spec, "attention"), stored(spec, "experts")) == (("fp8", 8), ("nvfp4", 4.5))
    assert stored(quantised(MIXTURE, quant_method="compressed-tensors", config_groups=groups), "head") == ("nvfp4", 4.5)


def test_gptq_may_leave_modules_out_and_take_the_head_in() -> None:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    spec = quantised(LLAMA, **plain, lm_head=True, dynamic={"-:.*self_attn.*": {}})
    assert stored(spec, "attention") == ("bf16", 16)
    assert stored(spec, "head") == ("w4a16", 4 + 20 / 128)


def test_mlx_may_give_the_embedding_bits_of_its_own() -> None:
    own = {"bits": 8, "group_size": 64}
    spec = quantised(LLAMA, bits=4, group_size=32, mode="affine", **{"language_model.model.embed_tokens": own})
    assert (stored(spec, "embedding"), stored(spec, "attention")) == (("mlx", 8.5), ("mlx", 5))
    plain = quantised(LLAMA, bits=4, group_size=32, mode="affine", **{"model.embed_tokens": False})
    assert stored(plain, "embedding") == ("bf16", 16)


def test_a_head_that_is_the_embedding_is_stored_as_it() -> None:
    spec = spec_of(
        LLAMA, tie_word_embeddings=True, quantization_config={"quant_method": "exl3", "bits": 4, "head_bits": 6}
    )
    assert spec.weights.stored("head") == spec.weights.stored("embedding") == Stored(format="bf16", bits=16)


def test_without_quantisation_all_parts_have_the_data_type() -> None:
    assert spec_of(LLAMA).weights.stored("experts") == Stored(format="bf16", bits=16)
    assert spec_of(LLAMA, torch_dtype="float16").weights.format == "bf16"
    single = spec_of(LLAMA, dtype="torch.float32").weights
    assert {single.stored(part).bits for part in ("attention", "vectors", "embedding", "head")} == {32}


def test_a_table_inside_the_language_model_counts_too() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    table = {"quant_method": "exl3", "bits": 3.5}
    spec = spec_of({"text_config": inner | {"quantization_config": table}, "model_type": "llava"})
    assert (spec.weights.format, spec.weights.bits) == ("exl3", 3.5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"quant_method": "abacus"},
            "quantization_config.quant_method: is 'abacus', which is not known; known are auto-round, awq, ",
        ),
        ({"quant_method": "gguf"}, "name the GGUF file, which is read itself"),
        ({}, "quantization_config.quant_method is missing"),
        ({"quant_method": "awq", "bits": 99}, "quantization_config.bits: is 99, outside the range of 1 to 16"),
        ({"quant_method": "awq", "bits": "four"}, "quantization_config.bits: is 'four', not a whole number"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: has 1 numbers, not two"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP3"},
            "quant_algo: is 'FP3', which is not known; known are FP8, ",
        ),
        ({"quant_method": "torchao", "quant_type": "autoquant"}, "quant_type: is 'autoquant', which is not known"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit None and .*load_in_8bit None contradict"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (compressed({"num_bits": 6, "type": "float"}), "num_bits: of floats is 6 in groups of 0"),
        (compressed(GROUP | {"type": "posit"}), "weights.type: is 'posit', which is not known"),
        (compressed(GROUP | {"strategy": "spiral"}), "weights.strategy: is 'spiral', which is not known"),
        (compressed(GROUP, ignore=["re:(a+)+$"]), "ignore: has the expression .* repeats a repetition"),
        (compressed(GROUP, ignore=["re:("]), "ignore: has '.*', which is no regular expression"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(table: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFile, match=message):
        spec_of(LLAMA, quantization_config=table)


def test_gpt_oss_has_the_published_bytes() -> None:
    """The total_size of both checkpoints' indices: 13,761,264,768 and 65,248,815,744."""
    oss = row("GptOssForCausalLM") | {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "vocab_size": 201_088,
        "head_dim": 64,
    }
    oss |= {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
    }
    for layers, experts, size in ((24, 32, 13_761_264_768), (36, 128, 65_248_815_744)):
        spec = quantised(oss | {"num_hidden_layers": layers, "num_local_experts": experts}, quant_method="mxfp4")
        assert sum(spec.weight_bytes.values()) == size

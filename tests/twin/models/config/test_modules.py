"""Matrices by name: they add up to the model's, and lists of modules mean what their writers mean."""

from typing import Any

import pytest

from tests.twin.models.config.sums import ROWS, name_of
from twin.errors import BadFile
from twin.models.config.architectures import readers
from twin.models.config.modules import Module, Patterns, modules_of
from twin.models.config.shape import Shape
from twin.models.fields import Fields
from twin.models.spec import Layer


def shape(config: dict[str, Any]) -> Shape:
    return readers()[config["architectures"][0]](Fields(config.get("text_config", config), "config.json"))


def layers(shape: Shape) -> list[Layer]:
    kinds = [kind for _ in range(shape.layers) for kind, count in shape.order for _ in range(count)]
    return [shape.kinds[kind] for kind in kinds[: shape.layers]]


@pytest.mark.parametrize("config", [row["config"] for row in ROWS], ids=name_of)
def test_matrices_add_up_to_those_of_attention_experts_and_head(config: dict[str, Any]) -> None:
    model, sizes = shape(config), dict.fromkeys(("attention", "feed_forward", "experts", "head"), 0)
    for module in modules_of(model):
        sizes[module.part] += module.parameters
        assert module.parameters > 0
        assert module.inputs > 1
    parts = [layer.parameters(model.hidden) for layer in layers(model)]
    for part in ("attention", "experts"):
        assert sizes[part] == sum(each.get(part, 0) for each in parts), part
    small = sum(layer.feed_forward.other_matrices for layer in layers(model) if layer.feed_forward)
    assert sizes["feed_forward"] == sum(each.get("feed_forward", 0) for each in parts) - small
    assert sizes["head"] == (0 if model.tied else model.hidden * model.vocab)


def module(*names: str) -> Module:
    return Module("attention", names, 1, 1)


@pytest.mark.parametrize(
    ("pattern", "meant", "spared"),
    [
        ("lm_head", "lm_head", "layers.0.mlp.up_proj"),
        ("model.layers.1.mlp.up_proj", "layers.1.mlp.up_proj", "layers.10.mlp.up_proj"),
        ("model.layers.1", "layers.1.mlp.up_proj", "layers.10.mlp.up_proj"),
        ("gate", "layers.0.mlp.gate", "layers.0.mlp.gate_proj"),
        ("model.language_model.layers.3.self_attn*", "layers.3.self_attn.q_proj", "layers.3.mlp.up_proj"),
        ("language_model.model.layers.3.mlp", "layers.3.mlp.up_proj", "layers.3.self_attn.q_proj"),
        ("model.layers.*.self_attn", "layers.7.self_attn.q_proj", "layers.7.mlp.up_proj"),
        ("*.mlp.shared_expert.*", "layers.7.mlp.shared_expert.up_proj", "layers.7.mlp.shared_experts.up_proj"),
        ("re:.*self_attn.*", "layers.7.self_attn.q_proj", "layers.7.mlp.up_proj"),
        (r"re:model\.layers\.[0-3]\.", "layers.3.mlp.up_proj", "layers.4.mlp.up_proj"),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "layers.0.mlp.up_proj", "layers.0.mlp.experts.0.up_proj"),
        ("re:backbone.*", "never", "layers.0.mlp.up_proj"),
    ],
)
def test_a_pattern_means_modules_below_what_it_names_and_no_others(pattern: str, meant: str, spared: str) -> None:
    patterns = Patterns([pattern], Fields({}, "config.json"), "ignore")
    assert (module(meant) in patterns) == (meant != "never")
    assert module(spared) not in patterns


def test_a_list_of_absurdly_many_expressions_is_refused() -> None:
    names, globs = [f"layers.{n}.mlp" for n in range(5000)], [f"layers.{n}.*.mlp" for n in range(257)]
    Patterns(names, Fields({}, "config.json"), "ignore")
    with pytest.raises(BadFile, match="ignore: has more than 256 expressions"):
        Patterns(globs, Fields({}, "config.json"), "ignore")


def test_one_of_several_names_of_a_module_is_enough() -> None:
    patterns = Patterns(["model.layers.0.self_attn.qkv_proj"], Fields({}, "config.json"), "ignore")
    assert module("layers.0.self_attn.q_proj", "layers.0.self_attn.qkv_proj") in patterns

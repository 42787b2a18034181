"""Decoders from before Llama: parameters to the unit, and published ones of those that transformers has no class of."""

from typing import Any

import pytest

from tests.twin.models.config.sums import name_of, row, rows_of, spec_of
from twin.errors import BadFile
from twin.models.config.elders import READERS
from twin.models.mixers import Attention


@pytest.mark.parametrize(("config", "parameters"), rows_of(READERS), ids=name_of)
def test_parameters_are_those_of_the_class(config: dict[str, Any], parameters: int) -> None:
    assert sum(spec_of(config).parameters.values()) == parameters


def test_gpt2_has_124_million_parameters() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    assert sum(spec_of(gpt2, vocab_size=50_257).parameters.values()) == 124_439_808


def test_qwen_7b_of_the_first_generation_has_the_published_number_of_parameters() -> None:
    qwen = {"architectures": ["QWenLMHeadModel"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 151_936}
    qwen |= {"num_attention_heads": 32, "kv_channels": 128, "intermediate_size": 22_016, "seq_length": 8192}
    assert sum(spec_of(qwen).parameters.values()) == 7_721_324_544


def test_chatglm3_6b_has_the_published_number_of_parameters() -> None:
    chatglm = {"architectures": ["ChatGLMModel"], "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32}
    chatglm |= {"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True}
    chatglm |= {"ffn_hidden_size": 13_696, "padded_vocab_size": 65_024, "seq_length": 8192}
    assert sum(spec_of(chatglm).parameters.values()) == 6_243_584_000


def test_local_layers_of_gpt_neo_have_a_window() -> None:
    spec = spec_of(row("GPTNeoForCausalLM"))
    assert [mixer.window for mixer in spec.mixers if isinstance(mixer, Attention)] == [0, 32]
    assert spec.layer_kinds == ("full", "sliding") * 2


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("OPTForCausalLM", {"word_embed_proj_dim": 24}, "word_embed_proj_dim 24 and hidden_size 48 contradict"),
        ("MptForCausalLM", {"no_bias": False}, "no_bias: is false"),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
        ("GPTNeoForCausalLM", {"attention_layers": ["local"]}, "attention_layers .* contradict"),
    ],
)
def test_what_is_not_known_of_them_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFile, match=message):
        spec_of(row(architecture), **changes)

"""Language models of which a multimodal file says only what differs from their class."""

from tests.twin.models.config.sums import spec_of
from twin.models.config.defaults import DEFAULTS


def test_llava_1_5_7b_names_little_of_its_language_model() -> None:
    """7,063,427,072 published, of which 303,507,456 are in the vision tower and 20,979,712 in the projector."""
    inner = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
    llava = {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner | {"vocab_size": 32_064}}
    spec = spec_of(llava)
    assert sum(spec.parameters.values()) == 7_063_427_072 - 303_507_456 - 20_979_712
    assert spec.native_ctx_tokens == 4096


def test_every_default_makes_a_model_and_gives_way_to_what_is_said() -> None:
    for kind, keys in DEFAULTS.items():
        spec = spec_of({"model_type": "llava", "text_config": {"model_type": kind}})
        assert (spec.hidden, spec.layers, spec.vocab) == (keys["hidden_size"], 32, keys["vocab_size"])
        said = spec_of({"model_type": "llava", "text_config": {"model_type": kind, "num_hidden_layers": 3}})
        assert said.layers == 3

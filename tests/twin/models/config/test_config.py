"""Reading a config.json: finding the architecture, what is said of it, and that nonsense gets one line."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.twin.models.config.sums import ROWS, row, spec_of
from twin.errors import BadFile
from twin.models import ModelSpec
from twin.models.config import DEFAULTS, read_config
from twin.models.config.architectures import FAMILIES, readers
from twin.models.spec import SCHEMA

LLAMA = row("LlamaForCausalLM")
MODELS = Path(__file__).parents[3] / "data" / "models"


def refused(config: dict[str, Any]) -> BadFile:
    with pytest.raises(BadFile) as caught:
        read_config(config, "config.json", name="toy")
    return caught.value


def test_a_model_says_where_it_is_from_and_survives_being_written_down() -> None:
    spec = spec_of(LLAMA)
    assert (spec.name, spec.source, spec.schema) == ("toy", "config.json of toy", SCHEMA)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize(
    ("name", "said", "full"),
    [
        ("nemotron-3-nano-30b-a3b", {"mamba_ssm_cache_dtype": None}, True),
        ("nemotron-3-nano-30b-a3b", {"mamba_ssm_cache_dtype": "bfloat16"}, False),
        ("qwen3-next-80b-a3b", {}, False),
        ("qwen3-next-80b-a3b", {"mamba_ssm_dtype": "float32"}, True),
        ("llama-3.1-8b", {"mamba_ssm_dtype": "float32"}, False),
    ],
)
def test_states_are_wanted_in_full_where_it_says_so(name: str, said: dict[str, str | None], *, full: bool) -> None:
    """Nemotron-H's are unless it says otherwise; without states there is nothing to want."""
    config = json.loads((MODELS / f"{name}.json").read_text())
    assert spec_of(config, **said).full_states is full


def test_keys_that_were_used_are_told_and_unknown_ones_are_listed() -> None:
    understood = read_config(LLAMA | {"colour": "red", "use_cache": True, "rope_scaling": None}, "c", name="toy")
    assert understood.ignored == ("colour",)
    assert understood.origins["architecture"] == "LlamaForCausalLM"
    assert understood.origins["hidden_size"] == "48"
    assert "use_cache" not in understood.origins


def test_an_architecture_that_is_not_known_is_refused_with_the_nearest_and_what_to_do() -> None:
    error = refused(LLAMA | {"architectures": ["LamaForCausalLM"]})
    assert error.message == "config.json: architecture 'LamaForCausalLM' is not known"
    assert error.hint.startswith("the nearest known one is LlamaForCausalLM; ")
    assert "schema twin.model/2" in error.hint
    assert "--save" in error.hint
    assert refused({"hidden_size": 8}).message == "config.json: architectures and model_type are missing"


def test_the_language_model_of_a_multimodal_one_is_read_and_the_rest_is_listed() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {"depth": 2}}
    for key in ("text_config", "llm_config", "language_config"):
        understood = read_config(outer | {key: inner}, "c", name="toy")
        assert understood.spec.parameters == spec_of(LLAMA).parameters
        assert understood.ignored == ("vision_config",)
        assert f"{key}.hidden_size" in understood.origins
    tied = read_config(outer | {"text_config": inner, "tie_word_embeddings": True}, "c", name="toy")
    assert tied.spec.tied


def test_a_thinker_holds_a_language_model_one_level_further_down() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": inner, "audio_config": {}}}
    assert read_config(config, "c", name="toy").spec.parameters == spec_of(LLAMA).parameters


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size or n_embd or d_model is missing"),
    ({"hidden_size": "48"}, "hidden_size: is '48', not a whole number"),
    ({"hidden_size": 48.5}, "hidden_size: is 48.5, not a whole number"),
    ({"hidden_size": math.nan}, "hidden_size: is nan, not a whole number"),
    ({"hidden_size": True}, "hidden_size: is True, not a whole number"),
    ({"hidden_size": 10**30}, "hidden_size: is 10+, outside the range of 1 to 1,048,576"),
    ({"num_hidden_layers": 4097}, "num_hidden_layers: is 4097, outside the range of 1 to 4,096"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: is 0"),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 and num_key_value_heads 4 contradict each other"),
    (
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        "hidden_size 48 and num_attention_heads 5 contradict each other",
    ),
    (
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        "rope_scaling.rope_type: is 'spiral', which is not known",
    ),
    ({"rope_scaling": {"type": 7}}, "rope_scaling.type: is 7, not a text"),
    ({"rope_scaling": "yarn"}, "rope_scaling: is 'yarn', not a table"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: is 'yes', neither true nor false"),
    ({"architectures": "LlamaForCausalLM"}, "architectures: is 'LlamaForCausalLM', not a list"),
    ({"architectures": [3]}, r"architectures: is \[3\], not a text"),
    (
        {"torch_dtype": "bfloat16", "dtype": "float32"},
        "dtype 'float32' and torch_dtype 'bfloat16' contradict each other",
    ),
    ({"torch_dtype": "int3"}, "torch_dtype: is 'int3', which is not known"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(row[0])[:40] for row in WRONG])
def test_what_is_wrong_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    with pytest.raises(BadFile, match=f"^config.json: {message}"):
        read_config(config, "config.json", name="toy")


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("MixtralForCausalLM", "intermediate_size"),
        ("GptOssForCausalLM", "intermediate_size"),
        ("DbrxForCausalLM", "ffn_config.moe_num_experts"),
        ("MiMoV2FlashForCausalLM", "sliding_window"),
    ],
)
def test_what_a_shape_follows_from_is_named_though_other_shapes_do_without(architecture: str, key: str) -> None:
    understood = read_config(row(architecture), "config.json", name="toy")
    assert key in understood.origins
    assert key not in understood.ignored


def test_layer_types_that_disagree_with_the_number_of_layers_are_refused() -> None:
    error = refused(row("Cohere2ForCausalLM") | {"layer_types": ["full_attention"] * 100_000})
    assert error.message.startswith("config.json: layer_types ['full_attention', ")
    assert error.message.endswith(" and num_hidden_layers 5 contradict each other: a list of 100,000 for 5 layers")
    error = refused(row("Cohere2ForCausalLM") | {"layer_types": ["spiral"] * 5})
    assert error.message == "config.json: layer_types: has 'spiral', which is not known"


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["x" * 10_000]},
        {"layer_types": ["x" * 10_000] * 5},
        {"torch_dtype": "x" * 10_000},
        {"rope_scaling": {"type": "x" * 10_000}},
        {"quantization_config": {"quant_method": "x" * 10_000}},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "x" * 10_000}},
    ],
)
def test_a_refusal_cuts_what_a_file_says_at_length(changes: dict[str, Any]) -> None:
    assert len(refused(row("Cohere2ForCausalLM") | changes).message) < 600


def test_every_family_reads_and_no_name_is_read_twice() -> None:
    assert set(FAMILIES) >= {"dense", "moe", "elders", "hunyuan"}
    assert {each["config"]["architectures"][0] for each in ROWS} <= set(readers())


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_junk_under_any_key_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from([each["config"] for each in ROWS]))
    keys = [*config, "quantization_config", "rope_scaling", "layer_types", "text_config", "torch_dtype"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), junk, min_size=1, max_size=3))
    said = "config.json: read"
    try:
        read_config(json.loads(json.dumps(config)) | changes, "config.json", name="toy")
    except BadFile as error:
        said = error.message
    assert said.startswith("config.json: ")
    assert "\n" not in said


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

"""Other weights for a known shape, against published sizes and against bits counted by hand."""

import pytest

from twin.errors import BadValue
from twin.models import ModelSpec, load_model
from twin.models.rewritten import in_weights, weight_names
from twin.units import GIB

LLAMA = load_model("llama-3.1-8b")
ENDS = 2 * 128_256 * 4096
LAYERS = 32 * (41_943_040 + 176_160_768)

LLAMA_CPP = {
    "iq3_s": 3.6606, "iq4_xs": 4.4597, "iq4_nl": 4.6818, "q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_l": 4.2979,
    "q4_k_s": 4.6672, "q4_k_m": 4.8944, "q5_k_s": 5.5704, "q5_k_m": 5.7036, "q6_k": 6.5633, "q8_0": 8.5008,
}  # fmt: skip
"""Bits a weight of Llama 3.1 8B: https://github.com/ggml-org/llama.cpp tools/quantize/README.md at 311c2c9f0ebd."""

HUB_GB = {"q3_k_m": 4.02, "q4_k_s": 4.69, "q4_k_m": 4.92, "q6_k": 6.60, "q8_0": 8.54}
"""Files of bartowski/Meta-Llama-3.1-8B-Instruct-GGUF as the hub lists them, in 10^9 bytes."""
METADATA_BYTES = 7.8e6
"""What such a file holds beside its tensors: 128,256 tokens and 280,147 merges, as text."""


def total(spec: ModelSpec) -> float:
    return sum(spec.weight_bytes.values())


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_mixes_of_llama_cpp_have_the_bits_that_it_publishes(name: str) -> None:
    bits = 8 * total(in_weights(LLAMA, name)) / sum(LLAMA.parameters.values())
    assert bits == pytest.approx(LLAMA_CPP[name], abs=6e-5)


@pytest.mark.parametrize("name", HUB_GB)
def test_files_have_the_size_that_the_hub_lists(name: str) -> None:
    assert (total(in_weights(LLAMA, name)) + METADATA_BYTES) / 1e9 == pytest.approx(HUB_GB[name], abs=0.006)


@pytest.mark.parametrize(("name", "tensor_bytes"), [("w4a16", 5_700_595_200), ("w8a16", 9_190_252_544)])
def test_groups_of_128_have_the_bytes_of_published_checkpoints(name: str, tensor_bytes: int) -> None:
    """`total_size` of two checkpoints that https://github.com/vllm-project/llm-compressor users made of the model."""
    assert total(in_weights(LLAMA, name)) == pytest.approx(tensor_bytes, rel=2e-6)


@pytest.mark.parametrize(
    ("name", "bits", "ends"),
    [
        ("bf16", 16, 16), ("fp32", 32, 32), ("fp8", 8, 16), ("fp8_block", 8 + 32 / 128**2, 16), ("int8", 8, 16),
        ("awq", 4 + (16 + 4) / 128, 16), ("gptq", 4 + (16 + 4) / 128, 16), ("nvfp4", 4.5, 16), ("mxfp4", 4.25, 16),
    ],
)  # fmt: skip
def test_the_layers_matrices_are_stored_so_and_the_two_ends_in_16_bits(name: str, bits: float, ends: float) -> None:
    norms = LLAMA.parameters["vectors"]
    assert total(in_weights(LLAMA, name)) == (LAYERS * bits + ENDS * ends + norms * 16) / 8


@pytest.mark.parametrize(("bits", "head"), [(3, 6), (4.05, 6), (8, 8)])
def test_exl3_has_so_many_bits_and_a_head_of_six_or_more(bits: float, head: float) -> None:
    found = in_weights(LLAMA, f"{bits:g}bpw")
    assert found.weights.format == "exl3"
    assert found.part_bits["attention"] == found.part_bits["feed_forward"] == bits
    assert (found.part_bits["head"], found.part_bits["embedding"]) == (head, 16)


def test_a_tied_embedding_is_as_wide_as_the_head_that_it_is() -> None:
    tied = in_weights(load_model("llama-3.2-1b"), "q4_k_m")
    assert (tied.part_bits["embedding"], in_weights(LLAMA, "q4_k_m").part_bits["embedding"]) == (6.5625, 4.5)


def test_routers_stay_wide_and_experts_are_stored_as_feed_forwards_are() -> None:
    model = load_model("qwen3-30b-a3b")
    assert in_weights(model, "fp8").part_bits["router"] == 16
    mixed = in_weights(model, "q4_k_m").part_bits
    assert (mixed["router"], mixed["vectors"]) == (32, 32)
    assert mixed["experts"] == mixed["feed_forward"] > 4.5


@pytest.mark.parametrize("name", weight_names())
def test_nothing_but_the_weights_changes_and_a_name_is_found_whatever_its_case_and_separators(name: str) -> None:
    found = in_weights(LLAMA, name)
    assert found.parameters == LLAMA.parameters
    assert found.kinds == LLAMA.kinds
    assert in_weights(LLAMA, name.upper().replace("_", "-")) == found


@pytest.mark.parametrize("written", ["4.05bpw", "4.05BPW", "4.05 bpw", "4.05-bpw"])
def test_bits_a_weight_are_read_whatever_their_case_and_separators(written: str) -> None:
    assert in_weights(LLAMA, written).weights.bits == 4.05


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "--weights: '' is not known"), ("q9_k", "--weights: 'q9_k' is not known"), ("bpw", "is not known"),
        ("nanbpw", "is not known"), ("4,05bpw", "is not known"), ("-4bpw", "is not known"), ("q8_k", "is not known"),
        ("0bpw", "0 bits a weight is outside the range of 1 to 8"), ("0.99bpw", "0.99 bits"), ("99bpw", "99 bits"),
    ],
)  # fmt: skip
def test_other_names_are_refused_with_those_that_are_known(name: str, says: str) -> None:
    with pytest.raises(BadValue) as refused:
        in_weights(LLAMA, name)
    assert says in str(refused.value)
    assert "bpw" in name or "N.NNbpw, or one of awq, bf16" in refused.value.hint


def test_published_sizes_of_the_plain_checkpoint() -> None:
    """14.96 GiB: https://github.com/ggml-org/llama.cpp tools/quantize/README.md at 311c2c9f0ebd, F16."""
    assert total(LLAMA) / GIB == pytest.approx(14.96, abs=0.005)

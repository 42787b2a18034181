"""llama.cpp is asked for by many names and for GGUFs, keeps K and V in two formats, names kernels by family."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import engine_names, load_engine
from twin.errors import BadValue, Impossible
from twin.models import load_model
from twin.models.ggml import QUANTISED
from twin.models.spec import Stored, Weights


def refused(**asked: object) -> str:
    with pytest.raises((Impossible, BadValue)) as wrong:
        resolve(Question(**({"ctx_tokens": 8192, "model": "llama-3.1-8b", "engine": "llama.cpp"} | asked)))  # type: ignore[arg-type]
    return wrong.value.message


@pytest.mark.parametrize("name", ["llama.cpp", "llamacpp", "llama-cpp", "LLAMA_CPP", "llama-server", "llama_server"])
def test_it_has_more_names_than_one_and_is_listed_once(name: str) -> None:
    assert load_engine(name).name == "llama.cpp"
    assert [each for each in engine_names() if each.startswith(("llama", "ollama"))] == ["llama.cpp"]


def test_ollama_is_llama_cpp_with_one_slot_and_runs_its_kernels() -> None:
    ollama, own = load_engine("Ollama"), load_engine("llama.cpp")
    assert ollama.cells is not None
    assert own.cells is not None
    assert (ollama.name, ollama.cells.slots, own.cells.slots) == ("ollama", 1, 4)
    assert ollama.kernel("linear", "q4_k") == own.kernel("linear", "q4_k") == "linear/llama.cpp/quantised"
    assert ollama.formats == own.formats


@pytest.mark.parametrize(
    ("weights", "engine"),
    [("q4_k_m", "llama.cpp"), ("iq2_xs", "llama.cpp"), ("bf16", "vllm"), ("awq", "vllm"), ("4.05bpw", "exllamav3")],
)
def test_weights_choose_the_engine_that_they_are_meant_for(weights: str, engine: str) -> None:
    case = resolve(Question(ctx_tokens=1, model="llama-3.1-8b", weights=weights))
    assert case.rules.name == engine
    asked = resolve(Question(ctx_tokens=1, model="llama-3.1-8b", weights="q4_k_m", engine="vllm"))
    assert asked.rules.name == "vllm"


def test_a_gguf_in_16_bits_is_its_own_too(tmp_path: Path) -> None:
    """Norms in fp32 give it away."""
    for vectors, engine in (("f32", "llama.cpp"), ("bf16", "vllm")):
        weights = Weights(format="bf16", bits=16, parts={"vectors": Stored(format=vectors, bits=32)})
        path = tmp_path / f"{vectors}.json"
        path.write_bytes(msgspec.json.encode(replace(load_model("llama-3.1-8b"), weights=weights)))
        assert resolve(Question(ctx_tokens=1, model=str(path))).rules.name == engine


def test_products_are_known_by_family_and_attention_by_format() -> None:
    rules = load_engine("llama.cpp")
    assert {rules.kernel("linear", name) for name in QUANTISED} == {"linear/llama.cpp/quantised"}
    assert {rules.kernel("experts", name) for name in ("f16", "bf16", "f32")} == {"experts/llama.cpp/f16"}
    case = resolve(Question(ctx_tokens=1, model="llama-3.1-8b", engine="llama.cpp", kv_dtype="q8_0/q4_0"))
    assert case.attention_kernel("attend_decode") == "attend_decode/llama.cpp/q4_0"
    assert case.kernel("append") == "append/llama.cpp/q4_0"


def test_what_it_does_not_have_is_refused_in_one_line() -> None:
    assert refused(kv_dtype="fp8") == "llama.cpp keeps no fp8 cache under vram"
    assert refused(kv_dtype="q8_0/fp8") == "llama.cpp keeps no q8_0/fp8 cache under vram"
    assert refused(engine="vllm", kv_dtype="bf16/fp8") == "vllm keeps K and V alike, not as bf16/fp8"
    assert "runs no q8_0 cache on 'llama.cpp_unfused'" in refused(kv_dtype="q8_0", backend="llama.cpp_unfused")
    assert "runs no fp16/q8_0 cache" in refused(kv_dtype="fp16/q8_0", backend="llama.cpp_unfused")
    assert refused(engine="vllm", gpu_layers=3) == "--ngl means nothing to vllm: llama.cpp understands it"
    assert refused(gpu_layers=-1) == "layers on devices -1 is outside the range of 0 to 4,097 layers"
    assert refused(gpu_layers=4, layout="nkvo") == "--ngl with layout 'nkvo' is not modelled"
    assert resolve(
        Question(
            ctx_tokens=1, model="llama-3.1-8b", engine="llama.cpp", kv_dtype="q8_0/fp16", backend="llama.cpp_unfused"
        )
    ).backend.endswith("unfused")


def test_a_chunk_need_not_be_whole_pages_of_cells() -> None:
    case = resolve(Question(ctx_tokens=8192, model="llama-3.1-8b", engine="llama.cpp", chunk_tokens=100))
    assert case.chunk_tokens == 100

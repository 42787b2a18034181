"""Which format, kernels and backends a question gets, what a what-if opens, and which device is too old."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from tests.worlds import machine, model
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import check_capability, resolve
from twin.engines import load_engine
from twin.errors import Impossible
from twin.formats import format_names, kv_format
from twin.models import ModelSpec, model_names
from twin.models.spec import Weights

HYBRID = "qwen3.8-27b"
VLLM = load_engine("vllm")


def asked(ctx_tokens: int = 1000, **question: Any) -> Case:
    return resolve(Question(ctx_tokens=ctx_tokens, **question))


def written(folder: Path, spec: ModelSpec, *, weights: str = "bf16") -> str:
    path = folder / "toy.json"
    kept = Weights(format=weights, bits=16, embedding_on_host=False, embedding_bits=16)
    path.write_bytes(msgspec.json.encode(replace(spec, weights=kept)))
    return str(path)


@pytest.mark.parametrize("name", VLLM.formats)
def test_vllm_keeps_each_of_its_formats_of_its_model(name: str) -> None:
    assert asked(model=HYBRID, kv_dtype=name).plane_bytes == kv_format(name).plane_bytes(kv_heads=4, head_dim=256)


@pytest.mark.parametrize(
    ("question", "message", "hint"),
    [
        ({"kv_dtype": "exl3_k4v4"}, "exllamav3 keeps no exl3_k4v4 cache under offload", "it keeps fp16; --what-if"),
        ({"kv_dtype": "fp8"}, "exllamav3 keeps no fp8 cache under offload", "it keeps fp16; --what-if"),
        ({"kv_dtype": "fp8", "layout": "vram"}, "exllamav3 keeps no fp8 cache under vram", "exl3_k2v2 to exl3_k8v8;"),
        ({"model": HYBRID, "kv_dtype": "fp16"}, "vllm keeps no fp16 cache under vram", "it keeps bf16, fp8,"),
        ({"model": HYBRID, "kv_dtype": "q8_0"}, "vllm keeps no q8_0 cache under vram", "--what-if counts its bytes"),
    ],
)
def test_a_format_that_the_engine_does_not_keep_there_is_refused_with_those_that_it_keeps(
    question: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(Impossible) as refused:
        asked(**question)
    assert str(refused.value) == message
    assert hint in refused.value.hint
    assert asked(**question, what_if=True).fmt.name == question["kv_dtype"]


@pytest.mark.parametrize("name", format_names())
@pytest.mark.parametrize("layout", ["vram", "offload"])
def test_a_what_if_opens_every_format_and_counts_its_bytes(name: str, layout: str) -> None:
    case = asked(kv_dtype=name, layout=layout, what_if=True)
    assert case.plane_bytes == kv_format(name).plane_bytes(kv_heads=2, head_dim=256)
    placed = case.layout.placement(case)
    in_vram = case.plane_bytes + 320 if layout == "vram" else 64
    assert (placed.vram_bytes, placed.host_bytes) == (in_vram, 0 if layout == "vram" else case.plane_bytes + 256)


def test_a_what_if_borrows_the_kernel_of_the_engines_default_format() -> None:
    """exllamav3, offloaded, in int4: 528 B instead of 2,048 a token and layer, read at the rate of fp16."""
    case = asked(kv_dtype="int4_per_token_head", what_if=True)
    assert (case.layout.name, case.plane_bytes) == ("offload", 528)
    assert case.kernel("gather_host") == "gather_host/exllamav3/fp16"
    assert case.attention_kernel("attend_dense") == "attend_dense/exllamav3/fp16"
    assert case.borrows


def test_a_format_that_the_engine_keeps_has_a_kernel_of_its_own() -> None:
    kept = asked(kv_dtype="exl3_k4v4", layout="vram")
    assert kept.kernel("gather_vram") == "gather_vram/exllamav3/exl3_k4v4"
    assert not kept.borrows
    assert asked(kv_dtype="exl3_k4v4", what_if=True).kernel("gather_host") == "gather_host/exllamav3/fp16"
    assert not asked(what_if=True).borrows


def test_indexer_keys_are_read_by_a_kernel_for_plain_ones_whatever_k_and_v_are() -> None:
    for question in ({}, {"kv_dtype": "exl3_k4v4", "layout": "vram"}, {"kv_dtype": "q4_0", "what_if": True}):
        case = asked(**question)
        assert case.index_kernel("scan") == "scan/exllamav3/fp16"
        assert case.index_key_bytes == 256


def test_products_of_a_quantised_cache_are_computed_in_16_bits() -> None:
    operands = [asked(model=HYBRID, kv_dtype=name).operand_dtype for name in ("bf16", "fp8", "kvarn_k4v2_g128")]
    assert operands == ["bf16"] * 3
    assert asked(kv_dtype="exl3_k4v4", layout="vram").operand_dtype == "fp16"
    assert asked(engine="twin", kv_dtype="fp32").operand_dtype == "fp32"


@pytest.mark.parametrize("head_dim", [24, 40])
def test_heads_that_do_not_fill_a_group_are_refused_even_by_a_what_if(tmp_path: Path, head_dim: int) -> None:
    spec = model(every=1, sparse=False)
    path = written(tmp_path, replace(spec, attention=replace(spec.attention, head_dim=head_dim)))
    with pytest.raises(Impossible, match=f"q8_0 needs head sizes that are multiples of 32, not {head_dim}"):
        asked(model=path, kv_dtype="q8_0", what_if=True)


BACKENDS = {
    "bf16": ("flash_attention", "split_kv"),
    "fp8": ("flashinfer", "flashinfer"),
    "int8_per_token_head": ("triton", "split_kv"),
    "fp8_per_token_head": ("triton", "triton"),
    "int4_per_token_head": ("triton", "triton"),
    "kvarn_k4v2_g128": ("kvarn", "kvarn"),
    "turboquant_4bit_nc": ("turboquant", "turboquant"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_format_has_a_backend_for_single_tokens_and_one_for_several(name: str) -> None:
    case = asked(model=HYBRID, kv_dtype=name)
    alone, verify = BACKENDS[name]
    assert (case.backend, case.verify_backend) == (alone, verify)
    assert case.attention_kernel("attend_decode") == f"attend_decode/{alone}/{name}"
    assert case.attention_kernel("attend_decode", 4) == f"attend_decode/{verify}/{name}"
    assert case.attention_kernel("attend_dense") == f"attend_dense/{alone}/{name}"


@pytest.mark.parametrize(
    ("name", "backend", "alone", "verify"),
    [
        ("bf16", "triton", "triton", "triton"),
        ("bf16", "flashinfer", "flashinfer", "flashinfer"),
        ("bf16", "split_kv", "flash_attention", "split_kv"),
        ("fp8", "triton", "triton", "triton"),
        ("int8_per_token_head", "triton", "triton", "triton"),
        ("int8_per_token_head", "split_kv_unpadded", "triton", "split_kv_unpadded"),
    ],
)
def test_a_backend_that_is_asked_for_runs_all_that_it_can(name: str, backend: str, alone: str, verify: str) -> None:
    """One that only verifies leaves single tokens and prefill to the format's first."""
    case = asked(model=HYBRID, kv_dtype=name, backend=backend)
    assert (case.backend, case.verify_backend) == (alone, verify)


def test_every_name_of_a_question_is_found_whatever_its_case_and_separators() -> None:
    written = asked(
        model="Qwen3.8-27B", engine="vLLM", layout="VRAM", kv_dtype="FP8", backend="Flash Infer", hw="RTX 3090"
    )
    assert (written.model.name, written.rules.name, written.layout.name) == (HYBRID, "vllm", "vram")
    assert (written.fmt.name, written.backend) == ("fp8", "flashinfer")


@pytest.mark.parametrize(
    ("question", "message", "hint"),
    [
        (
            {"model": HYBRID, "kv_dtype": "fp8", "backend": "kvarn"},
            "vllm runs no fp8 cache on 'kvarn'",
            "it has flashinfer, triton",
        ),
        (
            {"model": HYBRID, "backend": "xformers"},
            "vllm runs no bf16 cache on 'xformers'",
            "it has flash_attention, triton, flashinfer, split_kv",
        ),
        (
            {"backend": "triton"},
            "exllamav3 runs no fp16 cache on 'triton'",
            "it has no choice of backends",
        ),
    ],
)
def test_a_backend_that_does_not_run_the_format_is_refused_with_those_that_do(
    question: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(Impossible) as refused:
        asked(**question)
    assert (str(refused.value), refused.value.hint) == (message, hint)


def test_a_format_that_needs_a_newer_device_is_refused_where_the_device_is_older() -> None:
    case, ampere = asked(model=HYBRID, kv_dtype="fp8_per_token_head"), load_profile("rtx3090")
    with pytest.raises(Impossible) as refused:
        check_capability(case, ampere)
    assert str(refused.value) == (
        "fp8_per_token_head does not start on rtx3090: vllm's kernels need SM 8.9 or newer, "
        "NVIDIA GeForce RTX 3090 has SM 8.6"
    )
    assert refused.value.hint == "--what-if counts its bytes anyway"


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "12.1"])
def test_a_format_starts_on_every_device_that_is_new_enough(capability: str) -> None:
    """Versions are compared number by number: 10.0 is newer than 8.9."""
    case, toy = asked(model=HYBRID, kv_dtype="fp8_per_token_head"), machine()
    check_capability(case, replace(toy, gpu=replace(toy.gpu, compute_capability=capability)))


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.8"])
def test_a_format_starts_on_no_device_before_it_unless_what_if(capability: str) -> None:
    toy = machine()
    old = replace(toy, gpu=replace(toy.gpu, compute_capability=capability))
    with pytest.raises(Impossible, match=f"need SM 8.9 or newer, toy has SM {capability}"):
        check_capability(asked(model=HYBRID, kv_dtype="fp8_per_token_head"), old)
    check_capability(asked(model=HYBRID, kv_dtype="fp8_per_token_head", what_if=True), old)


@pytest.mark.parametrize("name", [name for name in VLLM.formats if name != "fp8_per_token_head"])
def test_every_other_format_starts_anywhere(name: str) -> None:
    toy = machine()
    check_capability(asked(model=HYBRID, kv_dtype=name), replace(toy, gpu=replace(toy.gpu, compute_capability="7.0")))


@pytest.mark.parametrize("name", ["auto", "AUTO"])
def test_auto_is_the_engines_own_format(name: str) -> None:
    for each in model_names():
        assert asked(model=each, kv_dtype=name).fmt is asked(model=each).fmt

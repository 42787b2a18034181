"""A case knows its bytes and the keys of its kernels, its own or those that a what-if borrows."""

from typing import Any

import pytest

from tests.twin.memory.pool_worlds import MODELS
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve

HYBRID = "qwen3.8-27b"
EXL3 = {"engine": "exllamav3", "weights": "4bpw", "layout": "vram"}


def asked(ctx_tokens: int = 1000, **question: Any) -> Case:
    return resolve(Question(ctx_tokens=ctx_tokens, **question))


def test_a_what_if_borrows_the_kernel_of_the_engines_default_format_unless_the_engine_keeps_the_format() -> None:
    """exllamav3, offloaded, in int4: 528 B instead of 2,048 a token and layer, read at the rate of fp16."""
    case = asked(kv_dtype="int4_per_token_head", what_if=True)
    assert (case.layout.name, case.plane_bytes, case.borrows) == ("offload", 528, True)
    assert case.kernel("gather_host") == "gather_host/exllamav3/fp16"
    assert case.attention_kernel("attend_dense") == "attend_dense/exllamav3/fp16"
    kept = asked(kv_dtype="exl3_k4v4", layout="vram")
    assert (kept.kernel("gather_vram"), kept.borrows) == ("gather_vram/exllamav3/exl3_k4v4", False)
    assert (kept.operand_dtype, asked(what_if=True).borrows) == ("fp16", False)


def test_indexer_keys_are_read_by_a_kernel_for_plain_ones_whatever_k_and_v_are() -> None:
    for question in ({}, {"kv_dtype": "exl3_k4v4", "layout": "vram"}, {"kv_dtype": "q4_0", "what_if": True}):
        case = asked(**question)
        assert case.index_kernel("scan") == "scan/exllamav3/fp16"
        assert case.index_key_bytes == 256


@pytest.mark.parametrize(
    ("name", "question", "latent", "key"),
    [
        ("deepseek-v3", {"kv_dtype": "bf16"}, 1152, 0),
        ("deepseek-v3", {"kv_dtype": "fp8"}, 576, 0),
        ("deepseek-v3.2", {"kv_dtype": "fp8"}, 656, 132),
        ("deepseek-v3", EXL3 | {"kv_dtype": "fp16"}, 1152, 0),
        ("deepseek-v3", EXL3 | {"kv_dtype": "exl3_k8v8"}, 672, 0),
        ("deepseek-v3", EXL3 | {"kv_dtype": "exl3_k4v4"}, 416, 0),
        ("deepseek-v3.2", EXL3 | {"kv_dtype": "exl3_k6v6"}, 544, 256),
    ],
)
def test_a_compressed_vector_is_quantised_and_its_shared_key_where_the_engine_does(
    name: str, question: dict[str, Any], latent: int, key: int
) -> None:
    """512 and 64 elements: vLLM's `fp8_ds_mla` takes 656 B, exllamav3 says 672, 544 and 416 B in 8, 6 and 4 bits."""
    case = asked(model=str(MODELS / f"{name}.json"), **question)
    assert (case.plane_bytes, case.index_key_bytes) == (latent, key)


@pytest.mark.parametrize(
    ("name", "question", "element_bytes"),
    [
        ("kimi-linear-48b-a3b", {}, 4),
        ("mamba-codestral-7b", {}, 2),
        ("qwen3.5-35b-a3b", {}, 4),
        ("qwen3.5-35b-a3b", {"state_dtype": "fp16"}, 2),
        ("qwen3.5-35b-a3b", EXL3, 2),
        ("nemotron-3-nano-30b-a3b", {}, 4),
        ("mamba-codestral-7b", {"state_dtype": "fp32"}, 4),
        ("mamba-codestral-7b", EXL3, 4),
        ("kimi-linear-48b-a3b", EXL3, 2),
    ],
)
def test_states_are_kept_in_full_where_the_engine_keeps_no_others_or_heeds_who_wants_them_so(
    name: str, question: dict[str, Any], element_bytes: int
) -> None:
    case = asked(model=str(MODELS / f"{name}.json"), **question)
    assert {case.state_bytes_of(mixer) for mixer in case.model.states} == {element_bytes}


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
    [("bf16", "triton", "triton", "triton"), ("bf16", "split_kv", "flash_attention", "split_kv"),
     ("int8_per_token_head", "split_kv_unpadded", "triton", "split_kv_unpadded")],
)  # fmt: skip
def test_a_backend_that_is_asked_for_runs_all_that_it_can(name: str, backend: str, alone: str, verify: str) -> None:
    """One that only verifies leaves single tokens and prefill to the format's first."""
    case = asked(model=HYBRID, kv_dtype=name, backend=backend)
    assert (case.backend, case.verify_backend) == (alone, verify)

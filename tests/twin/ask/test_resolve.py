"""Which engine, layout, format and backend a question gets, and which combinations are refused in one line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import MODELS
from tests.worlds import machine, model
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import check_capability, machine_of, resolve
from twin.errors import BadValue, Impossible
from twin.formats import format_names, kv_format
from twin.models import ModelSpec, model_names
from twin.models.spec import Weights

SPARSE, HYBRID, DENSE = "qwen3.8-flash-next", "qwen3.8-27b", "llama-3.1-8b"


def asked(ctx_tokens: int = 1000, **question: Any) -> Case:
    return resolve(Question(ctx_tokens=ctx_tokens, **question))


def written(folder: Path, spec: ModelSpec, *, weights: str = "bf16") -> str:
    path = folder / "toy.json"
    kept = Weights(format=weights, bits=16)
    path.write_bytes(msgspec.json.encode(replace(spec, weights=kept)))
    return str(path)


def test_this_projects_own_kernels_are_never_chosen_for_anyone(tmp_path: Path) -> None:
    """A sparse model in bf16 is what only they load."""
    path = written(tmp_path, model())
    with pytest.raises(Impossible, match=r"no engine here loads toy in bf16") as refused:
        asked(model=path)
    assert refused.value.hint.startswith("--engine NAME counts its memory")
    assert asked(model=path, engine="twin").layout.name == "offload"


@pytest.mark.parametrize(
    ("weights", "sparse", "engine"),
    [
        ("exl3", True, "exllamav3"),
        ("exl3", False, "exllamav3"),
        *((name, False, "vllm") for name in ("bf16", "w4a16", "fp8", "int8", "w8a16", "mxfp4", "nvfp4", "nf4", "fp32")),
    ],
)
def test_the_engine_follows_from_the_checkpoint(tmp_path: Path, weights: str, sparse: bool, engine: str) -> None:
    case = asked(model=written(tmp_path, model(sparse=sparse), weights=weights))
    assert (case.rules.name, case.hw) == (engine, case.rules.machine)
    assert case.layout.name == ("offload" if sparse else "vram")


def test_a_checkpoint_in_fp32_is_run_in_16_bits() -> None:
    """By vLLM, which converts what it loads: 13.48 GB and not 26.95."""
    model = asked(model=str(MODELS / "llama-2-7b-fp32.json")).model
    assert model.weights.format == "bf16"
    assert sum(model.weight_bytes.values()) == 2 * sum(model.parameters.values())


def test_a_tied_head_is_quantised_apart_from_the_embedding_by_exllamav3() -> None:
    """Its bytes in 6 bits are beside an embedding on the host."""
    tied, apart = (asked(model=str(MODELS / "qwen3-0.6b.json"), **more).model for more in ({}, {"weights": "4bpw"}))
    assert (tied.tied, apart.tied) == (True, False)
    assert apart.weight_bytes["head"] == tied.hidden * tied.vocab * 6 / 8
    assert apart.weight_bytes["embedding"] == tied.weight_bytes["embedding"] == tied.hidden * tied.vocab * 2


@pytest.mark.parametrize("kv_dtype", ["int8_per_token_head", "kvarn_k4v2_g128", "turboquant_4bit_nc"])
def test_a_compressed_cache_is_kept_in_no_format_of_heads(kv_dtype: str) -> None:
    with pytest.raises(Impossible, match=f"{kv_dtype} keeps keys and values of heads, deepseek-v3 caches compressed"):
        asked(model=str(MODELS / "deepseek-v3.json"), kv_dtype=kv_dtype)


@pytest.mark.parametrize("engine", ["exllamav3", "twin"])
def test_a_model_that_reads_its_whole_cache_is_not_offloaded(engine: str) -> None:
    with pytest.raises(Impossible) as refused:
        asked(model=HYBRID, engine=engine, layout="offload")
    whole = "qwen3.8-27b reads its whole cache at every step: offload needs sparse attention"
    assert str(refused.value) == whole


NO_LINK = "--copies means nothing under layout 'vram': its planes never cross the link"
NO_POOL = "--cold-start means nothing to twin: it shares no pool of blocks among requests"
INT4, FP8 = {"kv_dtype": "int4_per_token_head", "what_if": True}, {"model": HYBRID, "kv_dtype": "fp8"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"staging_bytes": 524_287}, "staging of 524,287 B is below the smallest of 524,288 B", "one page of 256 tokens"),
    (INT4 | {"staging_bytes": 135_167}, "staging of 135,167 B is below the smallest of 135,168 B", "one page of"),
    (FP8 | {"backend": "kvarn"}, "vllm runs no fp8 cache on 'kvarn'", "it has flashinfer"),
    ({"model": DENSE, "chunk_tokens": 1000}, "chunk of 1,000 tokens is not a multiple of vllm's page of 16", ""),
    ({"layout": "vram", "kv_dtype": "fp8"}, "exllamav3 keeps no fp8 cache under vram", "it keeps fp16, exl3_k2v2 to"),
    ({"layout": "vram", "copies": "serial"}, NO_LINK, ""),
    ({"prefill": "staged", "batch": 2}, "exllamav3 stages a prefill only for one sequence at a time", ""),
    ({"model": HYBRID, "layout": "offload"}, "vllm has no layout 'offload'", "it has vram"),
    (
        {"engine": "twin", "speculation": "mtp:3"},
        "speculation is modelled for engines whose requests share a pool and llama.cpp, not for twin",
        "",
    ),
    ({"model": DENSE, "speculation": "mtp:3", "accepted": 2.0}, "llama-3.1-8b has no drafter", "ask without --spec"),
    ({"accepted": 2.0}, "--accept means nothing without --spec: one step yields one token", ""),
    ({"engine": "twin", "cold_start": True}, NO_POOL, ""),
    ({"model": HYBRID, "ngram": "ram"}, "qwen3.8-27b has no n-gram table", ""),
    ({"model": HYBRID, "max_model_tokens": 999}, "context 1,000 is above the longest request of 999 tokens", ""),
    (FP8 | {"batch": 9, "max_sequences": 8}, "a batch of 9 is more than the 8 sequences that vllm may run", ""),
    ({"model": HYBRID, "cached_tokens": 100}, "cached tokens need prefix caching", "add --prefix-cache"),
]
"""One of each kind: the others are among the refusals of tests/golden."""


@pytest.mark.parametrize(("question", "message", "hint"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_does_not_go_together_is_refused_in_one_line(question: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises((BadValue, Impossible)) as refused:
        asked(**question)
    assert str(refused.value) == message
    assert refused.value.hint.startswith(hint)
    assert "\n" not in refused.value.hint


@pytest.mark.parametrize("name", format_names())
@pytest.mark.parametrize("layout", ["vram", "offload"])
def test_a_what_if_opens_every_format_and_counts_its_bytes(name: str, layout: str) -> None:
    case = asked(kv_dtype=name, layout=layout, what_if=True)
    assert case.plane_bytes == kv_format(name).plane_bytes(kv_heads=2, head_dim=256)
    placed = case.layout.placement(case)
    in_vram = case.plane_bytes + 320 if layout == "vram" else 64
    assert (placed.vram_bytes, placed.host_bytes) == (in_vram, 0 if layout == "vram" else case.plane_bytes + 256)


@pytest.mark.parametrize("head_dim", [24, 40])
def test_heads_that_do_not_fill_a_group_are_refused_even_by_a_what_if(tmp_path: Path, head_dim: int) -> None:
    spec = model(every=1, sparse=False)
    (layer,) = spec.kinds.values()
    heads = replace(layer.mixers[0], head_dim=head_dim)
    path = written(tmp_path, replace(spec, kinds={"attention": replace(layer, mixers=(heads,))}))
    with pytest.raises(Impossible, match=f"q8_0 needs head sizes that are multiples of 32, not {head_dim}"):
        asked(model=path, kv_dtype="q8_0", what_if=True)


def test_every_name_of_a_question_is_found_whatever_its_case_and_separators() -> None:
    written = asked(
        model="Qwen3.8-27B", engine="vLLM", layout="VRAM", kv_dtype="FP8", backend="Flash Infer", hw="RTX 3090"
    )
    assert (written.model.name, written.rules.name, written.layout.name) == (HYBRID, "vllm", "vram")
    assert (written.fmt.name, written.backend) == ("fp8", "flashinfer")
    for name in model_names():
        assert asked(model=name, kv_dtype="AUTO").fmt is asked(model=name).fmt  # the engine's own
    with pytest.raises(BadValue, match="context 0"):  # numbers are checked before any name
        asked(0, model="nobody's")


@pytest.mark.parametrize(
    ("capability", "starts"),
    [("7.5", False), ("8.6", False), ("8.8", False), ("8.9", True), ("9.0", True), ("10.0", True), ("12.1", True)],
)
def test_a_format_starts_on_no_device_before_its_own_unless_what_if(capability: str, *, starts: bool) -> None:
    """Versions are compared number by number: 10.0 is newer than 8.9."""
    toy, question = machine(), {"model": HYBRID, "kv_dtype": "fp8_per_token_head"}
    device = replace(toy, gpu=replace(toy.gpu, compute_capability=capability))
    check_capability(asked(**question, what_if=True), device)
    if starts:
        check_capability(asked(**question), device)
    else:
        with pytest.raises(Impossible, match=f"need SM 8.9 or newer, toy has SM {capability}"):
            check_capability(asked(**question), device)


def test_a_question_changes_the_machine_that_it_names_and_one_that_is_given() -> None:
    case = asked(hw="rtx3090", gpus=3, lanes=4, pcie_generation=3, ram_bytes=2**36, vram_free_bytes=2**34)
    named = machine_of(case, None)
    assert (named.name, named.gpu_count) == ("3x-rtx3090", 3)
    assert (named.host.memory.value, named.gpu.vram.value) == (2**36, 2**34)
    assert named.gpu.h2d.datasheet.value == pytest.approx(4 * 0.985e9)
    assert machine_of(asked(gpus=3), machine()).name == "3x-toy"
    assert machine_of(asked(), machine()) == machine()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hw": "m3-max", "gpus": 2}, "m3-max: .*2 devices cannot each be the one memory of the host"),
        ({"hw": "gb10", "lanes": 8}, "gb10: device and host have one memory and no link"),
        ({"hw": "rtx3090", "pcie_generation": 5}, "rtx3090: PCIe 5.0 x16 is faster than its own"),
        ({"hw": "rtx3090", "vram_free_bytes": 2**35}, "rtx3090: a device has 25,297,357,373 B of VRAM, fewer than"),
        ({"hw": "rtx3090", "ram_bytes": 2**30}, "rtx3090: .*host.reserved"),
    ],
)
def test_what_a_machine_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Impossible, match=says):
        machine_of(asked(**changes), None)


def test_a_device_without_cuda_starts_no_kernel_that_needs_it() -> None:
    case = asked(model=HYBRID, kv_dtype="fp8_per_token_head", hw="mi300x")
    with pytest.raises(Impossible, match=r"kernels need SM .* AMD Instinct MI300X has no CUDA"):
        machine_of(case, None)


@pytest.mark.parametrize("hw", ["m1-max", "m2-ultra"])
def test_an_engine_of_cuda_and_rocm_does_not_run_on_other_devices(hw: str) -> None:
    for what_if in (True, False):
        with pytest.raises(Impossible, match=f"vllm does not run on {hw}: Apple .* has neither CUDA nor ROCm"):
            machine_of(asked(model=DENSE, engine="vllm", hw=hw, what_if=what_if), None)


def test_on_rocm_an_engine_keeps_the_formats_whose_kernels_are_there() -> None:
    for kv_dtype in ("bf16", "fp8", "int8_per_token_head"):
        assert machine_of(asked(model=DENSE, engine="vllm", hw="mi300x", kv_dtype=kv_dtype), None).name == "mi300x"
    for kv_dtype in ("kvarn_k4v2_g128", "turboquant_4bit_nc"):
        with pytest.raises(Impossible, match=f"vllm keeps no {kv_dtype} cache on mi300x, which has no CUDA") as refused:
            machine_of(asked(model=DENSE, engine="vllm", hw="mi300x", kv_dtype=kv_dtype), None)
        assert "there it keeps bf16, fp8" in refused.value.hint


def test_a_release_is_asked_for_with_the_engines_name() -> None:
    case = asked(model=DENSE, engine="vllm==0.19")
    assert (case.rules.name, case.rules.version, case.chunk_tokens) == ("vllm", "0.19", 2048)

"""Which engine, layout, format and backend a question gets, and which combinations are refused in one line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.worlds import model
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import engine_names, load_engine
from twin.errors import BadValue, Impossible, TwinError, UnknownName
from twin.models import ModelSpec, load_model, model_names
from twin.models.spec import Weights

SPARSE, HYBRID, DENSE = "qwen3.8-flash-next", "qwen3.8-27b", "llama-3.1-8b"
VLLM = load_engine("vllm")


def asked(ctx_tokens: int = 1000, **question: Any) -> Case:
    return resolve(Question(ctx_tokens=ctx_tokens, **question))


def written(folder: Path, spec: ModelSpec, *, weights: str = "bf16") -> str:
    path = folder / "toy.json"
    kept = Weights(format=weights, bits=16, embedding_on_host=False, embedding_bits=16)
    path.write_bytes(msgspec.json.encode(replace(spec, weights=kept)))
    return str(path)


@pytest.mark.parametrize(
    ("name", "engine", "layout", "fmt", "machine"),
    [
        (SPARSE, "exllamav3", "offload", "fp16", "3x-rtx3090"),
        (HYBRID, "vllm", "vram", "bf16", "rtx3090"),
        ("qwen3.8-27b-fast", "vllm", "vram", "bf16", "rtx3090"),
        ("qwen3.8-27b-int8-mlp", "vllm", "vram", "bf16", "rtx3090"),
        (DENSE, "vllm", "vram", "bf16", "rtx3090"),
    ],
)
def test_a_model_alone_gets_an_engine_that_loads_it_and_that_engines_defaults(
    name: str, engine: str, layout: str, fmt: str, machine: str
) -> None:
    case = asked(model=name)
    assert (case.rules.name, case.layout.name, case.fmt.name, case.hw) == (engine, layout, fmt, machine)
    assert case.chunk_tokens == case.rules.chunk_tokens
    assert case.state_element_bytes == case.rules.state_element_bytes
    assert (case.speculation, case.cached_tokens) == (None, 0)


def test_what_an_engine_does_with_an_offloaded_cache_is_the_default() -> None:
    for name in ("exllamav3", "twin"):
        case, rules = asked(engine=name), load_engine(name)
        assert case.staging_bytes == rules.sparse.staging_bytes
        assert case.copies == ("overlapped" if rules.sparse.overlaps_copies else "serial")
        assert (case.prefill, case.pooled, case.huge_pages, case.ngram) == ("auto", "vram", True, rules.ngram)
    assert asked(engine="twin").copies == "overlapped"
    dense = asked(model=HYBRID)
    assert (dense.staging_bytes, dense.copies, dense.ngram) == (0, "serial", "ram")
    chosen = asked(copies="overlapped", pooled="host", host_pages="4KiB", ngram="ram", prefill="naive")
    assert (chosen.copies, chosen.pooled, chosen.huge_pages, chosen.ngram) == ("overlapped", "host", False, "ram")


def test_every_shipped_model_has_an_engine() -> None:
    for name in model_names():
        case = asked(model=name)
        assert case.model.weights.format in case.rules.weight_formats


def test_this_projects_own_kernels_are_never_chosen_for_anyone(tmp_path: Path) -> None:
    """A sparse model in bf16 is what only they load."""
    path = written(tmp_path, model())
    with pytest.raises(Impossible, match=r"no engine here loads toy \(bf16\)") as refused:
        asked(model=path)
    assert refused.value.hint == "name one with --engine"
    assert asked(model=path, engine="twin").layout.name == "offload"


def test_a_checkpoint_that_no_engine_loads_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, model(every=1, sparse=False), weights="nf4")
    with pytest.raises(Impossible, match=r"no engine here loads toy \(nf4\)"):
        asked(model=path)


@pytest.mark.parametrize(
    ("weights", "sparse", "engine"),
    [("exl3", True, "exllamav3"), ("exl3", False, "exllamav3"), ("bf16", False, "vllm"), ("w4a16", False, "vllm")],
)
def test_the_engine_follows_from_the_checkpoint(tmp_path: Path, weights: str, sparse: bool, engine: str) -> None:
    case = asked(model=written(tmp_path, model(sparse=sparse), weights=weights))
    assert case.rules.name == engine
    assert case.layout.name == ("offload" if sparse else "vram")


@pytest.mark.parametrize("layout", ["vram", "offload"])
def test_a_sparse_model_may_be_asked_for_under_either_layout(layout: str) -> None:
    assert asked(layout=layout).layout.name == layout


def test_a_model_that_reads_its_whole_cache_is_not_offloaded() -> None:
    with pytest.raises(Impossible, match="vllm has no layout 'offload'") as refused:
        asked(model=HYBRID, layout="offload")
    assert refused.value.hint == "it has vram"
    with pytest.raises(Impossible) as refused:
        asked(model=HYBRID, engine="exllamav3", layout="offload")
    whole = "qwen3.8-27b reads its whole cache at every step: offload needs sparse attention"
    assert str(refused.value) == whole


def test_sparse_attention_needs_an_engine_that_has_it() -> None:
    with pytest.raises(Impossible, match="vllm has no sparse attention") as refused:
        asked(engine="vllm")
    assert refused.value.hint == "ask for another engine or model"


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ({"model": "qwen4"}, "model"),
        ({"engine": "llama.cpp"}, "engine"),
        ({"engine": ""}, "engine"),
        ({"layout": "disk"}, "layout"),
        ({"layout": ""}, "layout"),
        ({"kv_dtype": "fp12"}, "KV format"),
        ({"kv_dtype": ""}, "KV format"),
    ],
)
def test_a_name_that_is_not_known_is_refused_as_what_it_should_have_been(question: dict[str, str], kind: str) -> None:
    with pytest.raises(UnknownName) as refused:
        asked(**question)
    assert str(refused.value) == f"unknown {kind} {next(iter(question.values()))!r}"
    assert "known: " in refused.value.hint


def test_numbers_are_checked_before_any_name() -> None:
    with pytest.raises(BadValue, match="context 0"):
        asked(0, model="nobody's")


POOLED: list[tuple[str, Any, str]] = [
    ("utilisation", 0.9, "--util"),
    ("pool_bytes", 2**30, "--pool"),
    ("max_model_tokens", 4096, "--max-model-len"),
    ("max_sequences", 8, "--max-seqs"),
    ("prefix_caching", True, "--prefix-cache"),
    ("cached_tokens", 100, "--cached"),
    ("cold_start", True, "--cold-start"),
    ("patched", False, "--stock"),
    ("async_scheduling", False, "--sync-scheduling"),
]


@pytest.mark.parametrize(("field", "value", "flag"), POOLED, ids=[row[0] for row in POOLED])
@pytest.mark.parametrize("engine", [name for name in engine_names() if load_engine(name).block_pool is None])
def test_what_only_a_pool_of_blocks_understands_is_refused_elsewhere(
    engine: str, field: str, value: Any, flag: str
) -> None:
    with pytest.raises(Impossible) as refused:
        asked(engine=engine, **{field: value})
    assert str(refused.value) == f"{flag} means nothing to {engine}: it shares no pool of blocks among requests"


@pytest.mark.parametrize(("field", "value"), [row[:2] for row in POOLED], ids=[row[0] for row in POOLED])
def test_an_engine_with_a_pool_of_blocks_understands_them(field: str, value: Any) -> None:
    caching = {"prefix_caching": True} if field == "cached_tokens" else {}
    assert getattr(asked(model=HYBRID, **{field: value}, **caching).question, field) == value


@pytest.mark.parametrize("field", ["staging_bytes", "prefill", "copies", "pooled", "host_pages"])
def test_what_only_an_offloaded_cache_understands_is_refused_in_vram(field: str) -> None:
    values = {"staging_bytes": 2**25, "prefill": "auto", "copies": "serial", "pooled": "vram", "host_pages": "huge"}
    for question in ({"layout": "vram"}, {"model": HYBRID}):
        with pytest.raises(Impossible) as refused:
            asked(**question, **{field: values[field]})
        flag = {"staging_bytes": "--staging", "host_pages": "--host-pages"}.get(field, f"--{field}")
        assert str(refused.value) == f"{flag} means nothing under layout 'vram': its planes never cross the link"


@pytest.mark.parametrize(
    ("question", "error", "message", "hint"),
    [
        ({"speculation": "mtp:3"}, Impossible, "speculation is modelled for vllm only, not for exllamav3", ""),
        ({"accepted": 2.0}, Impossible, "--accept means nothing without --spec: one step yields one token", ""),
        ({"task": "all"}, Impossible, "--task means nothing without --spec: one step yields one token", ""),
        (
            {"model": HYBRID, "accepted": 2.0},
            Impossible,
            "--accept means nothing without --spec: one step yields one token",
            "",
        ),
        (
            {"model": DENSE, "speculation": "mtp:3", "accepted": 2.0},
            Impossible,
            "llama-3.1-8b has no drafter",
            "ask without --spec",
        ),
        (
            {"model": HYBRID, "cached_tokens": 100},
            Impossible,
            "cached tokens need prefix caching",
            "add --prefix-cache",
        ),
        (
            {"model": HYBRID, "max_model_tokens": 999},
            BadValue,
            "context 1,000 is above the longest request of 999 tokens",
            "",
        ),
        (
            {"model": HYBRID, "chunk_tokens": 1000},
            BadValue,
            "chunk of 1,000 tokens is not a multiple of vllm's page of 16",
            "",
        ),
        ({"model": HYBRID, "ngram": "ram"}, Impossible, "qwen3.8-27b has no n-gram table", ""),
        ({"model": DENSE, "ngram": "disk"}, Impossible, "llama-3.1-8b has no n-gram table", ""),
        (
            {"prefill": "staged", "batch": 2},
            Impossible,
            "exllamav3 stages a prefill only for one sequence at a time",
            "",
        ),
        (
            {"staging_bytes": 524_287},
            BadValue,
            "staging of 524,287 B is below the smallest of 524,288 B",
            "one page of 256 tokens with K and V",
        ),
        (
            {"kv_dtype": "int4_per_token_head", "what_if": True, "staging_bytes": 135_167},
            BadValue,
            "staging of 135,167 B is below the smallest of 135,168 B",
            "one page of 256 tokens with K and V",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    question: dict[str, Any], error: type[TwinError], message: str, hint: str
) -> None:
    with pytest.raises(error) as refused:
        asked(**question)
    assert (str(refused.value), refused.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("model_name", "state_dtype", "element_bytes"),
    [(HYBRID, None, 2), (HYBRID, "fp16", 2), (HYBRID, "fp32", 4), (SPARSE, None, 2), (SPARSE, "fp32", 4)],
)
def test_a_recurrent_state_has_the_type_that_is_asked_for(
    model_name: str, state_dtype: Any, element_bytes: int
) -> None:
    assert asked(model=model_name, state_dtype=state_dtype).state_element_bytes == element_bytes


def test_a_drafter_and_its_acceptance_are_found_for_the_format_that_is_asked_for() -> None:
    case = asked(112_648, model=HYBRID, kv_dtype="kvarn_k4v2_g128", speculation="mtp:3", task="summarize+answer")
    assert case.speculation is not None
    assert (case.speculation.drafter.name, case.speculation.tokens) == ("mtp", 3)
    assert case.speculation.accepted == 2.38


@pytest.mark.parametrize("longest", [1000, 2**20])
def test_a_context_no_longer_than_the_longest_request_is_taken(longest: int) -> None:
    assert asked(model=HYBRID, max_model_tokens=longest).question.max_model_tokens == longest


def test_the_machine_is_the_one_that_is_named_or_else_the_engines() -> None:
    assert asked(hw="h200").hw == "h200"
    assert asked().hw == load_engine("exllamav3").machine
    assert asked(model=DENSE).hw == VLLM.machine


def test_a_question_stays_in_its_case_as_it_was_asked() -> None:
    question = Question(ctx_tokens=77, model=HYBRID, kv_dtype="fp8", batch=3)
    assert resolve(question).question is question
    assert resolve(question).model == load_model(HYBRID)

"""Rulebooks name only what exists, and their pages round up."""

import pytest

from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import backend_names, engine_names, load_engine
from twin.errors import BadValue, Impossible, UnknownName
from twin.formats import kv_format
from twin.layouts import load_layout


@pytest.mark.parametrize("name", engine_names())
def test_a_rulebook_names_layouts_and_formats_that_exist(name: str) -> None:
    rules = load_engine(name)
    assert rules.name == name
    assert rules.chunk_tokens % rules.page_tokens == 0
    assert [load_layout(layout).name for layout in rules.layouts] == list(rules.layouts)
    own, backends = rules.own_kernels, rules.backends
    assert {*own.decode_plans, *own.interleaved_formats, *backends.by_format, *backends.verify} <= {*rules.formats}
    assert {*own.interleaved_formats} <= {*rules.host_formats}
    assert all(kv_format(fmt).name == fmt for fmt in (*rules.formats, *rules.host_formats))
    assert rules.all_backends() >= {*rules.backends.verify.values(), *rules.backends.piecewise}


@pytest.mark.parametrize("name", engine_names())
def test_defaults_by_card_are_backends_that_run_the_format(name: str) -> None:
    rules, backends = load_engine(name), load_engine(name).backends
    for by_format in backends.by_capability.values():
        assert all(backend in rules.backends_of(fmt) for fmt, backend in by_format.items())
    assert {*backends.of_latents.values(), *backends.widest_heads} <= rules.all_backends()
    assert backends.without_cuda in {"", *rules.all_backends()}
    for key in rules.needs:
        backend, _, fmt = key.rpartition("/")
        assert fmt in rules.formats
        assert not backend or backend in rules.backends_of(fmt)


def test_a_question_that_names_no_engine_is_answered_by_one_that_volunteers() -> None:
    assert not load_engine("sglang").volunteers
    assert not load_engine("transformers").volunteers
    assert resolve(Question(ctx_tokens=1, model="qwen3-8b")).rules.volunteers


def test_backends_of_several_query_tokens_only_are_named_last_and_unknown_engines_are_refused() -> None:
    rules = load_engine("vllm")
    assert rules.backends_of("bf16") == ("flash_attention", "triton", "flashinfer", "fa3", "trtllm_mha", "split_kv")
    assert {"split_kv", "split_kv_unpadded", "kvarn"} <= set(backend_names())
    with pytest.raises(Impossible, match="vllm has no sparse attention"):
        _ = rules.sparse
    for name in ("exllama", "rules", "__init__"):
        with pytest.raises(UnknownName, match=f"unknown engine {name!r}"):
            load_engine(name)


@pytest.mark.parametrize(
    ("asked", "used", "share", "copies", "told"),
    [
        ("0.28", "0.28", 0.92, 3.5, ""), ("0.28.1", "0.28", 0.92, 3.5, ""), ("0.26", "0.26", 0.92, 3.5, ""),
        ("0.19.1", "0.19.1", 0.9, 3.5, ""), ("0.16", "0.16", 0.9, 9.5, ""), ("0.11.0", "0.11.0", 0.9, 9.5, ""),
        ("0.10.2", "0.11", 0.9, 9.5, "0.10.2"), ("0.33", "0.28", 0.92, 3.5, "0.33"), ("1.0", "0.28", 0.92, 3.5, "1.0"),
    ],
)  # fmt: skip
def test_a_release_has_the_rules_of_the_last_change_before_it_or_of_the_nearest_that_is_known(
    asked: str, used: str, share: float, copies: float, told: str
) -> None:
    rules = load_engine(f"vllm=={asked}")
    assert rules.block_pool is not None
    assert (rules.name, rules.version, rules.asked_version) == ("vllm", used, told)
    assert rules.title == f"vllm {used}"
    assert (rules.block_pool.utilisation, rules.block_pool.startup.sampled_copies.value) == (share, copies)


def test_a_version_that_is_none_or_of_an_engine_with_one_set_of_rules_is_refused() -> None:
    for version in ("", "new", "28", "0.28rc1", "0.28 "):
        with pytest.raises(BadValue, match="is no version of vllm"):
            load_engine(f"vllm=={version}")
    with pytest.raises(Impossible, match="exllamav3 is modelled in one version"):
        load_engine("exllamav3==0.0.4")
    assert load_engine("exllamav3").title == "exllamav3"

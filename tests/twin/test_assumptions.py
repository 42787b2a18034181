"""A prediction names the assumptions that it leans on, and only those."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.worlds import case, flash_next, machine, model
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.assumptions import ASSUMPTIONS, assumptions_of, beyond_native

LLAMA = Question(ctx_tokens=1, model="llama-3.1-8b", engine="llama.cpp")
WINDOWS = replace(LLAMA, model="gpt-oss-20b")
VLLM = Question(ctx_tokens=1, model="gpt-oss-20b", engine="vllm")
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def named(of_case: Case, *, gpu_count: int = 1) -> set[str]:
    return set(assumptions_of(of_case, machine(gpu_count=gpu_count), extrapolated=()))


@pytest.mark.parametrize(
    ("key", "leans", "does_not"),
    [
        ("A4", flash_next(), case()),
        ("A7", flash_next(), case(layout="vram", spec=model(every=1, sparse=False))),
        ("A8", flash_next(), flash_next(prefill="naive")),
        ("A9", flash_next(), flash_next(layout="vram")),
        ("A10", flash_next(), case()),
        ("A11", flash_next(batch=2), flash_next()),
        ("A12", flash_next(), flash_next(layout="vram")),
        ("A13", flash_next(262_145), flash_next(262_144)),
        ("A19", resolve(Question(ctx_tokens=1, model="gpt-oss-20b", engine="twin")), flash_next()),
        ("A19", resolve(Question(ctx_tokens=1, model="gpt-oss-20b", engine="exllamav3")), resolve(VLLM)),
        ("A19", resolve(replace(WINDOWS, whole_windows=True)), resolve(WINDOWS)),
        ("A22", resolve(replace(LLAMA, gpu_layers=32)), resolve(replace(LLAMA, gpu_layers=33))),
        ("A22", resolve(replace(LLAMA, layout="nkvo")), resolve(LLAMA)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_assumption_is_named_where_it_matters(key: str, leans: Case, does_not: Case) -> None:
    assert key in named(leans)
    assert key not in named(does_not)


def test_some_assumptions_always_hold_and_all_named_ones_exist() -> None:
    for of_case in (case(layout="vram"), flash_next(10**6, batch=2)):
        assert {"A1", "A2", "A3", "A5"} <= named(of_case) <= ASSUMPTIONS.keys()
        assert named(of_case, gpu_count=2) - named(of_case) == {"A6"}  # workspace, spread over several devices
    *_, last = assumptions_of(case(), machine(), extrapolated=("linear at 4096 tokens",))
    assert last == "extrapolated: linear at 4096 tokens"


def test_every_assumption_is_written_down_under_its_number() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert re.findall(r"^- \*\*(A\d+)\*\*", text, flags=re.MULTILINE) == list(ASSUMPTIONS)


@pytest.mark.parametrize("tokens", [1, 262_144, 262_145, 1 << 31])
def test_beyond_the_models_own_context_is_said_with_both_sides_and_who_refuses_it(tokens: int) -> None:
    notes = beyond_native(flash_next(), tokens)
    assert bool(notes) == (tokens > 262_144)
    for note in notes:
        assert note.startswith(f"{tokens:,} tokens are beyond the model's own 262,144: ")
        assert "refuses" not in note  # exllamav3 does not
    (note,) = beyond_native(resolve(Question(ctx_tokens=1, model="llama-3.1-8b")), 131_073)
    assert note.endswith("; vllm refuses so long a request without it")

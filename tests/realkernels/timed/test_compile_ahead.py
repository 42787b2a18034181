"""Kernels are compiled in processes of their own; one that cannot be says why and stops nobody."""

from typing import Any

import pytest
import torch

from realkernels.timed import compile_ahead as compiling
from realkernels.timed.compile_ahead import COMBINED_SPLITS, Wanted, compile_ahead


def test_what_cannot_be_compiled_is_told_and_not_raised() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine would compile it")
    failed = compile_ahead([Wanted("bf16", "aligned", 1)] * 3, device="cuda:0")
    assert failed
    assert all(words and "\n" not in words for words in failed)


def test_each_kernel_is_compiled_once_and_the_combining_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    class Process:
        def __init__(self, _command: list[str], **options: Any) -> None:
            given.append(options["stdin"].read().decode())

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_left: object) -> None:
            pass

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(compiling.subprocess, "Popen", Process)
    wanted = [Wanted("fp16", "aligned", 1), Wanted("q8_0", "aligned", 4), Wanted("q8_0", "aligned", 4)]
    assert compile_ahead([*wanted, Wanted("kvarn_k4v2_g128", "aligned", 1, "append")], device="cuda:0") == []
    lines = sorted(line for text in given for line in text.splitlines())
    combined = [f"{dtype} aligned {splits} combine" for dtype in ("bf16", "fp16") for splits in COMBINED_SPLITS]
    kernels = ["fp16 aligned 1 decode", "q8_0 aligned 4 decode", "kvarn_k4v2_g128 aligned 1 append"]
    assert lines == sorted([*kernels, *combined])


def test_a_process_that_ends_without_a_word_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    assert compile_ahead([Wanted("bf16", "aligned", 1)], device="cuda:0") == [
        "a compiling process ended without a word"
    ]

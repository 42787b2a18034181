"""Which layers have a window: by the file, and by the architecture where the file does not say."""

from typing import Any

import pytest

from twin.errors import BadFile
from twin.models.fields import Fields
from twin.models.gguf.windows import RULES, Windows, windows_of

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def windows(architecture: str, layers: int = 8, **told: Any) -> Windows:
    names = {"window": WINDOW, "pattern": PATTERN}
    return windows_of(architecture, Fields({names[key]: value for key, value in told.items()}, "a file"), layers)


def letters(found: Windows) -> str:
    return "".join("w" if flag else "f" for flag in found.layers)


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [
        ("gemma2", "wfwfwfwf"), ("gemma3", "wwwwwfww"), ("gemma3n", "wwwwfwww"), ("gpt-oss", "wfwfwfwf"),
        ("cohere2", "wwwfwwwf"), ("cohere2moe", "fwwwfwww"), ("olmo2", "wwwfwwwf"), ("plamo3", "wwwwwwwf"),
        ("smallthinker", "fwwwfwww"), ("lfm2", "wwwwwwww"), ("phi3", "ffffffff"), ("llama", "ffffffff"),
        ("qwen2", "ffffffff"),
    ],
)  # fmt: skip
def test_an_architecture_has_a_pattern_of_its_own(architecture: str, pattern: str) -> None:
    assert letters(windows(architecture, window=1024)) == pattern


def test_what_the_file_says_comes_first() -> None:
    flags = [1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert letters(windows("gemma2", window=1024, pattern=flags)) == "wwffwwff"
    assert letters(windows("gemma2", window=1024, pattern=4)) == "wwwfwwwf"
    assert letters(windows("an unknown one", window=1024, pattern=4)) == "wwwfwwwf"
    assert letters(windows("an unknown one", window=1024, pattern=0)) == "wwwwwwww"
    assert letters(windows("gemma3", window=0)) == "ffffffff"
    with pytest.raises(BadFile, match=f"a file: {PATTERN}: has 2 flags, and the model 8 layers"):
        windows("gemma2", window=1024, pattern=[1, 0])
    with pytest.raises(BadFile, match=f"a file: {WINDOW} is missing"):
        windows("an unknown one", pattern=[1] * 8)
    with pytest.raises(BadFile, match=f"a file: {WINDOW} is missing"):
        windows("gpt-oss")


def test_windows_and_chunks_of_files_that_do_not_say_them() -> None:
    assert windows("gemma2").window(0) == 4096
    assert windows("gemma2", window=512).window(0) == 512
    assert windows("smallthinker", window=512).window(1) == 4096
    chunked = windows("llama4")
    assert (chunked.window(0), chunked.chunk(0), chunked.chunk(3)) == (0, 8192, 0)
    assert windows("llama4", window=0).chunk(0) == 0
    assert (letters(windows("exaone4")), letters(windows("exaone4", 64))) == ("f" * 8, "wwwf" * 16)
    assert all(rule.period >= 0 for rule in RULES.values())

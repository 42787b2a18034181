"""The tree of refusals: one line each, a fitting builtin, an exit code."""

import pytest

from twin.errors import BadFile, BadValue, CannotWrite, Impossible, MissingRate, TwinError, UnknownName


@pytest.mark.parametrize(
    ("error", "builtin", "exit_code"),
    [
        (BadValue, ValueError, 2),
        (BadFile, ValueError, 2),
        (Impossible, ValueError, 2),
        (MissingRate, KeyError, 2),
        (CannotWrite, OSError, 5),
    ],
)
def test_a_refusal_is_its_message_and_the_fitting_builtin(
    error: type[TwinError], builtin: type[Exception], exit_code: int
) -> None:
    """A KeyError would show its message in quotes; ours does not."""
    refusal = error("what is wrong", hint="what to try")
    assert str(refusal) == refusal.message == "what is wrong"
    assert refusal.hint == "what to try"
    assert refusal.exit_code == exit_code
    assert isinstance(refusal, builtin)
    assert isinstance(refusal, TwinError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ofload", "did you mean offload? known: offload, vram"),
        ("off", "did you mean offload? known: offload, vram"),
        ("vrma", "did you mean vram? known: offload, vram"),
        ("zzz", "known: offload, vram"),
        ("", "known: offload, vram"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    refusal = UnknownName("layout", name, {"vram", "offload"})
    assert str(refusal) == f"unknown layout {name!r}"
    assert refusal.hint == hint
    assert isinstance(refusal, KeyError)
    assert refusal.exit_code == 2

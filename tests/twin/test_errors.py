"""The tree of refusals: one line each, a fitting builtin, an exit code."""

import pytest

from twin.errors import BadFile, BadValue, CannotWrite, Impossible, MissingRate, TwinError, UnknownName


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(BadValue, ValueError), (BadFile, ValueError), (Impossible, ValueError), (MissingRate, KeyError),
     (CannotWrite, OSError)],
)  # fmt: skip
def test_a_refusal_is_its_message_and_the_fitting_builtin(error: type[TwinError], builtin: type[Exception]) -> None:
    """A KeyError would show its message in quotes; ours does not."""
    refusal = error("what is wrong", hint="what to try")
    assert str(refusal) == refusal.message == "what is wrong"
    assert refusal.hint == "what to try"
    assert refusal.exit_code == (5 if error is CannotWrite else 2)
    assert isinstance(refusal, builtin)
    assert isinstance(refusal, TwinError)


@pytest.mark.parametrize(
    ("name", "nearest"), [("ofload", "offload"), ("off", "offload"), ("vrma", "vram"), ("zzz", ""), ("", "")]
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    refusal = UnknownName("layout", name, {"vram", "offload"})
    assert str(refusal) == f"unknown layout {name!r}"
    assert refusal.hint == (f"did you mean {nearest}? " if nearest else "") + "known: offload, vram"
    assert isinstance(refusal, KeyError)
    assert refusal.exit_code == 2

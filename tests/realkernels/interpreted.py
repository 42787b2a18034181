"""Triton's interpreter patches triton.language anew at every call of a device function; once a launch is enough."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch(patches: pytest.MonkeyPatch) -> None:
    """What a launch has patched stays so until it ends: to patch it again changes nothing and takes a third of it."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    @cache
    def languages(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def once(function: Callable[..., Any]) -> Any:
        seen = languages(function)
        if seen and seen <= patched:
            return None  # a device function: nobody asks for its scope
        patched.update(seen)
        return patch(function)

    def launched(self: Any, *given: Any, **named: Any) -> None:
        patched.clear()
        try:
            launch(self, *given, **named)
        finally:
            patched.clear()

    patches.setattr(interpreter, "_patch_lang", once)
    patches.setattr(interpreter.GridExecutor, "__call__", launched)

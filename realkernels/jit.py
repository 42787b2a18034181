"""Triton, or what stands in for it where it is not installed: kernels can then be defined, but not launched.

A codec has its torch reference and its Triton functions in one file, and the reference is all that a computer without
Triton (any but Linux) runs. `INTERPRETED` is true where Triton's interpreter runs the kernels, on CPU tensors.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.errors import TritonError
    from triton.language.extra import libdevice
    from triton.runtime.jit import JITFunction
except ImportError:

    class _Absent:
        """Decorators give back the function, types and constants the value that they are given."""

        def jit(self, function: Callable[..., Any] | None = None, **_options: object) -> Any:
            return function or self.jit

        def __getattr__(self, _name: str) -> Any:
            return lambda value=None, *_given: value

    triton = tl = libdevice = _Absent()
    JITFunction = TritonError = _Absent


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""A constant of the kernels, fixed when they are defined."""

__all__ = ["INTERPRETED", "JITFunction", "TritonError", "libdevice", "stable_keys", "tl", "triton"]


def stable_keys(module: Mapping[str, Any]) -> None:
    """Hash the Triton functions of a module (its `globals()`) in the order that it defines them; its last line.

    Compiled kernels then have the same key in every process, so that one finds what another compiled. Triton 3.6 hashes
    a kernel once, when it is first asked for, with the constants of the functions that it calls if those happen to have
    been hashed before and without them if not: the key then says in which order a process met its kernels, and a
    process that compiled ahead leaves its kernels where no other looks (3.9 hashes the called function first).

    To be called where a function uses a constant of its module and two others call that function. Imported functions
    are left to their own module, and the interpreter keeps no keys.
    """
    for function in module.values():
        if isinstance(function, JITFunction) and function.fn.__module__ == module["__name__"]:
            _ = function.cache_key

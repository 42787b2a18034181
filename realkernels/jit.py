"""Triton, or what stands in for it where it is not installed: kernels can then be defined, but not launched.

A codec has its torch reference and its Triton functions in one file, and the reference is all that a computer without
Triton (any but Linux) runs. `INTERPRETED` is true where Triton's interpreter runs the kernels, on CPU tensors.
"""

import os
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from realkernels.kernels.stable_keys import stable_keys as settle
except ImportError:

    class _Absent:
        """Decorators give back the function, types and constants the value that they are given."""

        def jit(self, function: Callable[..., Any] | None = None, **_options: object) -> Any:
            return function or self.jit

        def __getattr__(self, _name: str) -> Any:
            return lambda value=None, *_given: value

    triton = tl = libdevice = _Absent()

    def settle(module: object) -> None:
        """Nothing is compiled, and nothing has a key."""


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""A constant of the kernels, fixed when they are defined."""

__all__ = ["INTERPRETED", "libdevice", "settle", "tl", "triton"]

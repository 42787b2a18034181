"""Stable keys under which Triton keeps compiled kernels, so that one process finds what another compiled.

Triton 3.6 hashes a kernel once, when it is first asked for, with the constants of the functions that it calls if those
happen to have been hashed before and without them if not: the key then says in which order a process met its kernels,
and a process that compiled ahead leaves its kernels where no other looks (3.9 hashes the called function first).
"""

from collections.abc import Mapping
from typing import Any

from triton.runtime.jit import JITFunction


def stable_keys(module: Mapping[str, Any]) -> None:
    """Hash the Triton functions of a module (its `globals()`) in the order that it defines them; its last line.

    To be called where a function uses a constant of its module and two others call that function. Imported functions
    are left to their own module, and the interpreter keeps no keys.
    """
    for function in module.values():
        if isinstance(function, JITFunction) and function.fn.__module__ == module["__name__"]:
            _ = function.cache_key

"""Print, as JSON, the keys of every kernel: hashed at import, and after asking in an order that the argument seeds.

A program of its own: the tests run interpreted, where nothing is compiled and nothing has a key.
"""

import importlib
import json
import pkgutil
import sys

import numpy as np
from triton.runtime.jit import JITFunction

import realkernels


def main() -> None:
    """Import and ask in the order of the names for seed 0, else in one shuffled by the seed."""
    seed = int(sys.argv[1])
    names = [found.name for found in pkgutil.walk_packages(realkernels.__path__, "realkernels.")]
    kernels = {}
    for name in _ordered(names, seed):
        for function in vars(importlib.import_module(name)).values():
            if isinstance(function, JITFunction):
                kernels[f"{function.fn.__module__}.{function.fn.__name__}"] = function
    at_import = sorted(name for name, function in kernels.items() if function.hash is not None)
    keys = {name: kernels[name].cache_key for name in _ordered(list(kernels), seed)}
    print(json.dumps({"at_import": at_import, "keys": keys}, sort_keys=True))


def _ordered(names: list[str], seed: int) -> list[str]:
    ordered = sorted(names)
    return list(np.random.default_rng(seed).permutation(ordered)) if seed else ordered


if __name__ == "__main__":
    main()

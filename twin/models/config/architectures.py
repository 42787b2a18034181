"""Every architecture that is read: class names of a config.json's `architectures`, and values of `model_type`."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from twin.models.config.shape import Reader

FAMILIES = ("dense", "elders", "moe", "hunyuan", "uneven", "latent", "hybrid", "qwen4", "mamba", "gemma", "llama4")
"""Modules of this package, each with `READERS: dict[str, Reader]`."""


@cache
def readers() -> dict[str, Reader]:
    """Readers of all families by name. Raises ValueError where two families read the same name."""
    table: dict[str, Reader] = {}
    for family in FAMILIES:
        if find_spec(f"twin.models.config.{family}") is None:
            continue
        for name, reader in import_module(f"twin.models.config.{family}").READERS.items():
            if table.setdefault(name, reader) is not reader:
                raise ValueError(f"{family} reads {name}, which another family reads too")
    return table

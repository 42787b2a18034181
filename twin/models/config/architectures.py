"""Every architecture that is read: class names of a config.json's `architectures`, and values of `model_type`."""

from functools import cache
from importlib import import_module

from twin.models.config.shape import Reader

FAMILIES = ("dense", "moe", "hybrid", "latent", "gemma", "mamba", "llama4", "uneven", "elders", "hunyuan", "qwen4")
"""Modules of this package, each with `READERS: dict[str, Reader]`; what is asked for most comes first."""


def reader_of(name: str) -> Reader | None:
    """The reader of an architecture; no family behind the one that has it is loaded."""
    return next((found for family in FAMILIES if (found := _family(family).get(name)) is not None), None)


@cache
def readers() -> dict[str, Reader]:
    """Readers of all families by name. Raises ValueError where two families read the same name."""
    table: dict[str, Reader] = {}
    for family in FAMILIES:
        for name, reader in _family(family).items():
            if table.setdefault(name, reader) is not reader:
                raise ValueError(f"{family} reads {name}, which another family reads too")
    return table


def _family(family: str) -> dict[str, Reader]:
    found: dict[str, Reader] = import_module(f"twin.models.config.{family}").READERS
    return found

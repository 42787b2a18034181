"""Where the planes of a KV cache live and how they are read; file name = name on the command line."""

from importlib import import_module
from pathlib import Path

from twin.errors import find
from twin.layouts.layout import CacheLayout, Placement

__all__ = ["CacheLayout", "Placement", "layout_names", "load_layout"]

_NOT_LAYOUTS = {"__init__", "layout"}


def layout_names() -> list[str]:
    """Names of all placements."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NOT_LAYOUTS)


def load_layout(name: str) -> CacheLayout:
    """The placement called `name`; UnknownName otherwise."""
    layout: CacheLayout = import_module(f"twin.layouts.{find('layout', name, layout_names())}").LAYOUT
    return layout

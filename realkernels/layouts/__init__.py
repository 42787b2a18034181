"""Where the planes of a cache are allocated: one file a placement, named as on the command line."""

from importlib import import_module
from pathlib import Path

from realkernels.backend import PlaneName, Tier
from realkernels.layouts.layout import Place, PlaneLayout, Planes, PlaneSpec

__all__ = ["Place", "PlaneLayout", "PlaneName", "PlaneSpec", "Planes", "layout_names", "layout_of_tier", "load_layout"]

_NOT_LAYOUTS = {"__init__", "layout"}


def layout_names() -> list[str]:
    """Names of all placements."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NOT_LAYOUTS)


def load_layout(name: str) -> PlaneLayout:
    """The placement called `name`; ValueError with all names otherwise."""
    if name not in layout_names():
        raise ValueError(f"no layout {name!r}; there are {', '.join(layout_names())}")
    layout: PlaneLayout = import_module(f"realkernels.layouts.{name}").LAYOUT
    return layout


def layout_of_tier(tier: Tier) -> PlaneLayout:
    """The placement whose K and V lie in `tier`; ValueError with all tiers otherwise."""
    layouts = {layout.tier: layout for layout in map(load_layout, layout_names())}
    if tier not in layouts:
        raise ValueError(f"no tier {tier!r}; there are {', '.join(sorted(layouts))}")
    return layouts[tier]

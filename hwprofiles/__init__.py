"""What a machine can do: measured rates with their spread, source and date."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwprofiles.profile import HardwareProfile
    from hwprofiles.store import load_profile, profile_names

__all__ = ["HardwareProfile", "load_profile", "profile_names"]

_HOMES = {"HardwareProfile": "profile", "load_profile": "store", "profile_names": "store"}


def __getattr__(name: str) -> Any:
    """What the door offers, loaded when it is asked for: a refusal needs the errors behind it and no schema."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hwprofiles.{_HOMES[name]}"), name)

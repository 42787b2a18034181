"""What a machine can do: measured rates with their spread, source and date."""

from hwprofiles.profile import HardwareProfile
from hwprofiles.store import load_profile, profile_names

__all__ = ["HardwareProfile", "load_profile", "profile_names"]

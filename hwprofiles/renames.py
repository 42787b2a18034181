"""Words of earlier releases in a profile, and today's: files that `twin calibrate` of 0.1.0 wrote are still read."""

from typing import Any

OPERATIONS = {"expand": "dequantise", "merge": "combine"}
"""What a kernel's name begins with."""

KERNEL_KEYS = {"merging": "combine"}
"""Keys of a kernel's entry."""


def in_todays_words(raw: Any) -> Any:
    """A profile as it was read, with its kernels in today's words. ValueError where one is there in both."""
    kernels = raw.get("kernels") if isinstance(raw, dict) else None
    if not isinstance(kernels, dict):
        return raw
    translated: dict[str, Any] = {}
    for name, entry in kernels.items():
        operation, slash, rest = name.partition("/")
        today = f"{OPERATIONS.get(operation, operation)}{slash}{rest}"
        if today != name and today in kernels:
            raise ValueError(f"$.kernels: {name} and {today} are two names of one kernel")
        translated[today] = _entry(today, entry)
    return {**raw, "kernels": translated}


def _entry(name: str, entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    for old, today in KERNEL_KEYS.items():
        if old in entry:
            if today in entry:
                raise ValueError(f"$.kernels.{name}: {old} and {today} are two names of one rate")
            entry = {KERNEL_KEYS.get(key, key): value for key, value in entry.items()}
    return entry

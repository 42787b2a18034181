"""Words of earlier releases in a profile, and today's: files that `twin calibrate` of 0.1.0 wrote are still read."""

from typing import Any

OPERATIONS = {"expand": "dequantise", "merge": "combine"}  # what a kernel's name begins with
KERNEL_KEYS = {"merging": "combine"}  # keys of a kernel's entry


def in_todays_words(raw: Any) -> Any:
    """A profile as it was read, with its kernels in today's words. ValueError where one is there in both."""
    kernels = raw.get("kernels") if isinstance(raw, dict) else None
    if not isinstance(kernels, dict):
        return raw
    today = _renamed(kernels, OPERATIONS, "kernel", "$.kernels").items()
    return {
        **raw,
        "kernels": {name: _renamed(entry, KERNEL_KEYS, "rate", f"$.kernels.{name}") for name, entry in today},
    }


def _renamed(table: Any, words: dict[str, str], what: str, path: str) -> Any:
    """A table with other first words of its keys; what is no table stays, to be refused by its schema."""
    if not isinstance(table, dict):
        return table
    made: dict[str, Any] = {}
    for key, value in table.items():
        word, slash, rest = key.partition("/")
        today = f"{words.get(word, word)}{slash}{rest}"
        if today != key and today in table:
            raise ValueError(f"{path}: {key} and {today} are two names of one {what}")
        made[today] = value
    return made

"""Models by their names on a hub: in the local cache, else fetched by huggingface_hub, configurations only."""

import os
from collections.abc import Iterator
from pathlib import Path

from twin.errors import BadFile

FETCHED = ["config.json", "*.safetensors.index.json"]
"""Files of a model that are fetched: never its weights, never its code."""


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetched (its `constants.py`)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def find(name: str, *, hint: str) -> Path:
    """The folder of the model called `org/name`. Raises BadFile where it is neither in the cache nor to be had."""
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    if folder.is_dir():
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise BadFile(f"{name}: not in {cache_folder()}, and HF_HUB_OFFLINE forbids fetching it", hint=hint)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra
    except ImportError:
        wanted = "pip install 'kv-twin[hub]' fetches configurations by name"
        raise BadFile(f"{name}: no such folder, nor a model in {cache_folder()}", hint=f"{hint}; {wanted}") from None
    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED))
    except Exception as wrong:  # noqa: BLE001 - whatever keeps a network from answering
        why = str(wrong).strip().partition("\n")[0] or type(wrong).__name__
        raise BadFile(f"{name}: not in {cache_folder()} and cannot be fetched: {why}", hint=hint) from None


def snapshot(folder: Path) -> Path:
    """The newest snapshot where it is a hub cache's folder of a model; else the folder itself. Raises BadFile."""
    snapshots = folder / "snapshots"
    if (folder / "config.json").exists() or not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    try:
        named = snapshots / main.read_text(encoding="utf-8").strip() if main.is_file() else None
    except (OSError, UnicodeDecodeError):
        named = None
    if named is not None and named.is_dir() and named.parent == snapshots:
        return named
    held = sorted(_folders(snapshots), key=lambda each: each.stat().st_mtime)
    if not held:
        raise BadFile(f"{folder}: a hub cache without a snapshot")
    return held[-1]


def _folders(parent: Path) -> Iterator[Path]:
    return (each for each in parent.iterdir() if each.is_dir())

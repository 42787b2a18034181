"""Models by their names on a hub: in the local cache, else fetched by huggingface_hub: configurations and headers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from twin.errors import BadFile
from twin.models.tensors import Stored

FETCHED = ["config.json", "model.safetensors.index.json", "hf_quant_config.json", "quantize_config.json"]
"""Files of a model that are fetched: never its weights, never its code."""
HEADERS = "headers.json"
MOST_BYTES = 2**26  # of a file of headers


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetched (its `constants.py`)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    return Path(os.environ.get("HF_HOME") or _caches() / "huggingface").expanduser() / "hub"


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def find(name: str, *, hint: str) -> Path:
    """The folder of the model called `org/name`. Raises BadFile where it is neither in the cache nor to be had."""
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    if folder.is_dir() and _described(folder):
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() not in {"", "0", "NO", "OFF", "FALSE"}:
        raise BadFile(f"{name}: not in {cache_folder()}, and HF_HUB_OFFLINE forbids fetching it", hint=hint)
    try:
        import huggingface_hub  # noqa: PLC0415 - an extra
    except ImportError:
        wanted = "pip install 'kv-twin[hub]' fetches configurations by name"
        raise BadFile(f"{name}: no such folder, nor a model in {cache_folder()}", hint=f"{hint}; {wanted}") from None
    return _fetched(name, huggingface_hub, hint)


def _fetched(name: str, hub: Any, hint: str) -> Path:
    """The new snapshot; headers of its tensors are kept beside, where the hub can send them without their tensors."""
    try:
        snapshot = Path(hub.snapshot_download(name, allow_patterns=FETCHED))
    except Exception as wrong:  # noqa: BLE001 - whatever keeps a network from answering
        why = str(wrong).strip().partition("\n")[0] or type(wrong).__name__
        raise BadFile(f"{name}: not in {cache_folder()} and cannot be fetched: {why[:300]}", hint=hint) from None
    if not (snapshot / "config.json").is_file():
        raise BadFile(f"{name}: has no config.json on the hub", hint=hint)
    try:
        told = hub.get_safetensors_metadata(name, revision=snapshot.name)
        tensors = [
            Stored(tensor, tuple(entry.shape), entry.data_offsets[1] - entry.data_offsets[0])
            for file in told.files_metadata.values()
            for tensor, entry in file.tensors.items()
        ]
        kept = headers_of(snapshot)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(msgspec.json.encode(tensors))
    except Exception:  # noqa: BLE001, S110 - no safetensors, an older library, a full disk: then its index says enough
        pass
    return snapshot


def headers_of(snapshot: Path) -> Path:
    """Where headers of a snapshot's tensors are kept, by its commit."""
    return _caches() / "kv-twin" / snapshot.parent.parent.name / snapshot.name / HEADERS


def kept_headers(snapshot: Path) -> list[Stored] | None:
    """What was fetched of a snapshot without weights; None: nothing that can be used."""
    path = headers_of(snapshot)
    try:
        if snapshot.parent.name != "snapshots" or path.stat().st_size > MOST_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=list[Stored])
    except (OSError, ValueError, RecursionError):
        return None


def _described(folder: Path) -> bool:
    """Whether one of its snapshots says what the model is: others hold no more than a tokenizer."""
    return any((each / "config.json").is_file() or any(each.glob("*.gguf")) for each in _snapshots(folder))


def snapshot(folder: Path) -> Path:
    """The newest snapshot where it is a hub cache's folder of a model; else the folder itself. Raises BadFile."""
    snapshots = folder / "snapshots"
    if (folder / "config.json").exists() or not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    try:
        named = (
            snapshots / main.read_text(encoding="utf-8").strip()
            if main.is_file() and main.stat().st_size < 200
            else None
        )
    except (OSError, UnicodeDecodeError):
        named = None
    if named is not None and named.parent == snapshots and (named / "config.json").exists():
        return named
    held = sorted(_snapshots(folder), key=lambda each: ((each / "config.json").exists(), each.stat().st_mtime))
    if not held:
        raise BadFile(f"{folder}: a hub cache without a snapshot")
    return held[-1]


def _snapshots(folder: Path) -> Iterator[Path]:
    snapshots = folder / "snapshots"
    return (each for each in (snapshots.iterdir() if snapshots.is_dir() else ()) if each.is_dir())

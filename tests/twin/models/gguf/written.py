"""GGUF files as the `gguf` library writes them, with a header alone: the data are a hole in the file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Dimensions, the fastest first, and type of tensors by name."""


def write(path: Path, metadata: dict[str, Any], tensors: Tensors) -> Path:
    """A file of an architecture; keys that begin with a point are of its own."""
    own = dict(metadata)
    architecture = own.pop("general.architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in own.items():
        add(writer, f"{architecture}{key}" if key.startswith(".") else key, value)
    for name, (dims, kind) in tensors.items():
        raw = GGMLQuantizationType[kind.upper()]
        writer.add_tensor_info(name, dims[::-1], np.dtype(np.float32), size_of(dims, kind), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    end = -(-path.stat().st_size // 32) * 32 + sum(-(-size_of(*told) // 32) * 32 for told in tensors.values())
    with path.open("r+b") as file:
        file.truncate(end)
    return path


def size_of(dims: tuple[int, ...], kind: str) -> int:
    """Bytes by the library's table."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return int(np.prod(dims, dtype=np.int64)) // block * block_bytes


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

"""Writing safetensors files, right and wrong ones, from the format's description alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8"}


def stored(dtype: str, values: np.ndarray) -> bytes:
    """Little-endian elements; BF16 is the upper half of a float32."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(DTYPES[dtype]).tobytes()


def header_of(tensors: dict[str, tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Entries one behind the other."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, values) in tensors.items():
        end = at + len(stored(dtype, values))
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, end]}
        at = end
    return header


def packed(header: Any, data: bytes, *, blanks: int = 0) -> bytes:
    """A file of a header (an object, or text as it is) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * blanks
    return len(text).to_bytes(8, "little") + text + data


def whole(tensors: dict[str, tuple[str, np.ndarray]], *, blanks: int = 0) -> bytes:
    """A right file."""
    data = b"".join(stored(dtype, values) for dtype, values in tensors.values())
    return packed(header_of(tensors), data, blanks=blanks)


def some(tokens: int = 20, kv_heads: int = 2, head_dim: int = 4, seed: int = 0) -> np.ndarray:
    """Normal numbers that every type holds exactly."""
    return (np.random.default_rng(seed).standard_normal((tokens, kv_heads, head_dim)) * 16).round() / 16


def write(path: Path, **tensors: np.ndarray) -> Path:
    """A file of float32 tensors; `__` in a name stands for a full stop."""
    path.write_bytes(whole({name.replace("__", "."): ("F32", values) for name, values in tensors.items()}))
    return path

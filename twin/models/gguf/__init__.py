"""Reading a GGUF: header.py reads one file's header, this one all parts of a model's, model.py what model that is.

A model may be split over files NAME-00001-of-0000N.gguf and so on: the first has the metadata; each has `split.no`
(from 0), `split.count` and the tensors that lie in it. Source: `tools/gguf-split/gguf-split.cpp` of
github.com/ggml-org/llama.cpp.
"""

import os
import re
from functools import lru_cache
from pathlib import Path

from twin.errors import BadFile
from twin.models.fields import Understood, shown
from twin.models.gguf.header import Header, read_header
from twin.models.gguf.model import model_of

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(path: Path) -> Understood:
    """The model of which the GGUF at `path` is, or is a part. Raises BadFile; no tensor is read."""
    try:
        about = os.stat(path)
    except OSError:
        return _read(path, ())  # which says what is wrong
    return _read(path, (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))


@lru_cache(maxsize=4)
def _read(path: Path, _state: tuple[int, ...]) -> Understood:
    """Remembered while the file stays as it is: an answer may ask for its model once for each of its alternatives."""
    numbered = _NUMBERED.fullmatch(path.name)
    return model_of(_model_header(path), str(path), name=numbered[1] if numbered else path.stem)


def _model_header(path: Path) -> Header:
    """The metadata of the first part, and the tensors of all parts of the model that has a part at `path`.

    Raises BadFile, with the name of the part that it is about.
    """
    header = read_header(path)
    parts = _number(header, path, "split.count", default=1)
    if parts == 1:
        return header
    numbered = _NUMBERED.fullmatch(path.name)
    if numbered is None or int(numbered[3]) != parts:
        raise BadFile(f"{path}: split.count is {parts:,}, but its name does not end in -00001-of-{parts:05}.gguf")
    folder, stem = path.parent, numbered[1]
    first = _part(folder / f"{stem}-00001-of-{parts:05}.gguf", 0, parts)
    tensors = dict(first.tensors)
    for number in range(1, parts):
        other = folder / f"{stem}-{number + 1:05}-of-{parts:05}.gguf"
        for name, tensor in _part(other, number, parts).tensors.items():
            if name in tensors:
                raise BadFile(f"{other}: tensor {shown(name)} is in an earlier part, too")
            tensors[name] = tensor
    told = _number(first, path, "split.tensors.count", default=len(tensors))
    if told != len(tensors):
        raise BadFile(f"{path}: split.tensors.count is {told:,}, but its {parts} parts have {len(tensors):,} tensors")
    return Header(first.metadata, tensors)


def _part(path: Path, number: int, parts: int) -> Header:
    if not path.exists():
        raise BadFile(f"{path}: is not there; the model is split into {parts} parts")
    header = read_header(path)
    for key, named in (("split.count", parts), ("split.no", number)):
        told = _number(header, path, key, default=-1)
        if told != named:
            raise BadFile(f"{path}: {key} is {shown(header.metadata.get(key))}, but by its name it should be {named}")
    return header


def _number(header: Header, path: Path, key: str, *, default: int) -> int:
    told = header.metadata.get(key, default)
    if isinstance(told, bool) or not isinstance(told, int):
        raise BadFile(f"{path}: {key}: is {shown(told)}, not a whole number")
    return told

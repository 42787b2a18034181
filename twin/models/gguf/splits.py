"""The header of a model that is split over files NAME-00001-of-0000N.gguf and so on.

The first file has the metadata; each has `split.no` (from 0), `split.count` and the tensors that lie in it. Source:
`tools/gguf-split/gguf-split.cpp` of github.com/ggml-org/llama.cpp.
"""

import re
from pathlib import Path

from twin.errors import BadFile
from twin.models.fields import shown
from twin.models.gguf.header import Header, read_header

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_model_header(path: Path) -> Header:
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

"""Reading a GGUF: header.py one file's, splits.py a model's, model.py what model that is."""

import os
import re
from functools import lru_cache
from pathlib import Path

from twin.models.fields import Understood
from twin.models.gguf.model import model_of
from twin.models.gguf.splits import read_model_header


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
    name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return model_of(read_model_header(path), str(path), name=name)

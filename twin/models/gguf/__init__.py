"""Reading a GGUF: header.py one file's, splits.py a model's, model.py what model that is."""

import re
from pathlib import Path

from twin.models.fields import Understood
from twin.models.gguf.model import model_of
from twin.models.gguf.splits import read_model_header


def read_gguf(path: Path) -> Understood:
    """The model of which the GGUF at `path` is, or is a part. Raises BadFile; no tensor is read."""
    name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return model_of(read_model_header(path), str(path), name=name)

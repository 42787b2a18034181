"""How a checkpoint stores its weights, by part: `quantization_config`, or else the data type of all of it.

Bits of an element include its scales and zeros. Norms, biases, routers and embeddings stay in the data type, and so
does the head unless the file says that it was quantised, too.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hwprofiles.files import read_json
from twin.errors import BadFile
from twin.models.config.shape import Shape
from twin.models.fields import Fields
from twin.models.spec import Part, Stored, Weights

if TYPE_CHECKING:
    from twin.models.config.methods import Plan

_BF16 = Stored(format="bf16", bits=16)

# A checkpoint in float16 has the bytes and the rates of one in bfloat16, and engines load both alike: one name.
_PLAIN = {
    "bfloat16": _BF16,
    "float16": _BF16,
    "half": _BF16,
    "auto": _BF16,
    "float32": Stored(format="fp32", bits=32),
    "float": Stored(format="fp32", bits=32),
    "float8_e4m3fn": Stored(format="fp8", bits=8),
}

BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files that say how a checkpoint was quantised where its config.json does not, and the method of each."""


_TABLES = ("quantization_config", "compression_config", "quantization")


def quantisation_beside(folder: Path) -> Fields | None:
    """The file of the folder that says how weights are quantised. Raises BadFile."""
    for name, method in BESIDE.items():
        path = folder / name
        if os.path.lexists(path):
            said = read_json(path)
            if not isinstance(said, dict):
                raise BadFile(f"{path}: not a JSON object")
            return Fields({"quant_method": method} | said, str(path))
    return None


def read_weights(tables: list[Fields], shape: Shape, beside: Fields | None = None) -> Weights:
    """Of the tables from the outermost to that of the language model, else of the file beside. Raises BadFile."""
    plain = _dtype(tables)
    found = next((table for key in _TABLES for outer in reversed(tables) if (table := outer.table(key))), None)
    for outer in tables:
        outer.without_effect(*_TABLES)  # the others say the same once more
    found = found or beside
    if found is None:
        parts: dict[Part, Stored] = {} if plain.format == "bf16" else {"vectors": plain}
        return Weights(format=plain.format, bits=plain.bits, parts=parts)
    plan = _plan(found)
    found.rest_without_effect()  # says how activations are quantised, or how the checkpoint was made
    return _by_part(shape, plan, plain if plain.bits >= _BF16.bits else _BF16)


def _dtype(tables: list[Fields]) -> Stored:
    """Of the language model's table, or of one around it; without any, 16 bits."""
    for table in tables:
        table.without_effect("dtype", "torch_dtype")
    for table in reversed(tables):
        names = [table.text(key).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in table]
        if len(set(names)) > 1:
            raise table.contradiction("two data types", "dtype", "torch_dtype")
        if names:
            if names[0] not in _PLAIN:
                key = "dtype" if "dtype" in table else "torch_dtype"
                raise table.unknown(key, names[0], _PLAIN)
            return _PLAIN[names[0]]
    return _BF16


def _plan(table: Fields) -> "Plan":
    """What the method makes of the table. Raises BadFile for one that is not known."""
    from twin.models.config.methods import METHODS  # noqa: PLC0415 - most checkpoints are not quantised
    from twin.models.config.schemes import SCHEMES  # noqa: PLC0415

    methods = METHODS | SCHEMES
    method = table.text("quant_method", default="")
    if not method:  # some say it otherwise
        if "quant_algo" in table or "quantization" in table:
            method = "modelopt"
        elif "desc_act" in table:  # as AutoGPTQ's quantize_config.json does
            method = "gptq"
        elif "bits" in table and "group_size" in table:
            method = "mlx"
        elif "load_in_4bit" in table or "load_in_8bit" in table:
            method = "bitsandbytes"
        else:
            raise table.missing("quant_method")
    reader: Callable[[Fields], Plan] | None = methods.get(method)
    if reader is None:
        if method == "gguf":
            raise table.wrong("quant_method", "is 'gguf': name the GGUF file, which is read itself")
        raise table.unknown("quant_method", method, sorted(methods))
    return reader(table)


def _by_part(shape: Shape, plan: "Plan", plain: Stored) -> Weights:
    """The mean of each part's matrices; its format is that of most of its elements."""
    from twin.models.config.modules import Module, modules_of  # noqa: PLC0415 - as above

    sizes: dict[Part, float] = {}
    bits: dict[Part, float] = {}
    formats: dict[Part, dict[str, float]] = {}
    for module in modules_of(shape):
        stored = plan.stored(module) or plain
        sizes[module.part] = sizes.get(module.part, 0) + module.parameters
        bits[module.part] = bits.get(module.part, 0) + module.parameters * stored.bits
        of_part = formats.setdefault(module.part, {})
        of_part[stored.format] = of_part.get(stored.format, 0) + module.parameters
    parts: dict[Part, Stored] = {
        part: Stored(format=max(formats[part], key=formats[part].__getitem__), bits=bits[part] / size)
        for part, size in sizes.items()
        if size
    }
    embedding = Module("embedding", (), shape.hidden * shape.vocab, shape.hidden)
    parts |= {"embedding": (plan.embedding and plan.embedding(embedding)) or plain, "router": plain}
    if shape.tied:
        parts["head"] = parts["embedding"]
    if plain.format != "bf16":
        parts["vectors"] = plain
    # what engines are asked for is how most of the layers are stored
    mains: list[Part] = [part for part in ("experts", "feed_forward", "attention") if part in parts]
    whole = parts[max(mains, key=lambda part: sizes[part])] if mains else plain
    kept = {part: stored for part, stored in parts.items() if stored != whole}
    if not any(feed and feed.experts > 1 for feed in (layer.feed_forward for layer in shape.kinds.values())):
        kept.pop("router", None)
    return Weights(format=whole.format, bits=whole.bits, parts=kept)

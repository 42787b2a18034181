"""How a checkpoint stores its weights, by part: `quantization_config`, or else the data type of all of it."""

from twin.models.config.shape import Shape
from twin.models.fields import Fields
from twin.models.spec import Weights

# A checkpoint in float16 has the bytes and the rates of one in bfloat16, and engines load both alike: one name.
PLAIN = {"bfloat16": ("bf16", 16), "float16": ("bf16", 16), "half": ("bf16", 16), "float32": ("fp32", 32)}


def read_weights(tables: list[Fields], shape: Shape) -> Weights:
    """Of the tables from the outermost to that of the language model. Raises BadFile."""
    del shape
    for table in reversed(tables):
        dtype = table.text("dtype", "torch_dtype", default="")
        if dtype:
            name, bits = PLAIN[dtype.removeprefix("torch.")]
            return Weights(format=name, bits=bits)
    return Weights(format="bf16", bits=16)

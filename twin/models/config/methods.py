"""Methods of quantisation by their `quant_method`: which matrices, in which format, at how many bits an element.

Sources: the configuration classes of transformers 5.24, compressed-tensors, ModelOpt, GPTQModel and AutoAWQ, ExLlama.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from twin.models.config.modules import Module, Patterns
from twin.models.fields import Fields
from twin.models.spec import Stored

SCALE = 16  # bits of a scale, where it has the checkpoint's data type
WIDE_SCALE = 32
BYTE_SCALE = 8  # of NVFP4 and MX formats

Storing = Callable[[Module], Stored | None]
"""How a matrix is stored; None: as it was."""


class Plan(Struct, frozen=True, kw_only=True):
    """What becomes of the matrices of a checkpoint."""

    stored: Storing
    embedding: Storing | None = None


def uniform(form: str, bits: float) -> Storing:
    """The same bits for all matrices."""
    return lambda _: Stored(format=form, bits=bits)


def grouped(form: str, bits: float, group: int, extra_bits: float) -> Storing:
    """So many bits more for every group of a row's elements; a group of -1 or 0 is the whole row."""
    return lambda module: Stored(format=form, bits=bits + extra_bits / (group if group > 0 else module.inputs))


def without(storing: Storing, ignored: Patterns, *, head: bool = False) -> Storing:
    """All matrices but the ignored ones; the head only where it is said."""
    return lambda module: None if (module.part == "head" and not head) or module in ignored else storing(module)


def patterns_of(table: Fields, *keys: str) -> Patterns:
    """The modules that the first of the keys lists."""
    key = next((key for key in keys if key in table), keys[0])
    return Patterns(table.texts(key, default=[]), table, key)


def bits_of(table: Fields, *keys: str, default: int | None = None) -> int:
    """Bits of an element under the first of the keys."""
    return table.integer(*keys, default=default, low=1, high=16)


def group_of(table: Fields, *, default: int = 128) -> int:
    """Elements of a row that share a scale; -1: the row."""
    return table.integer("group_size", default=default, low=-1, high=2**20)


def integers(bits: int, group: int, zero_bits: int) -> Storing:
    """Whole numbers that are multiplied in 16 bits, with a scale and a zero for every group of a row."""
    return grouped(f"w{bits}a16", bits, group, SCALE + zero_bits)


def awq(table: Fields) -> Plan:
    """Scales and zeros for every group of a row; zeros are there even where they are all the same."""
    bits, group = bits_of(table, "bits", "w_bit", default=4), group_of(table)
    ignored = patterns_of(table, "modules_to_not_convert")
    return Plan(stored=without(integers(bits, group, bits), ignored))


def gptq(table: Fields) -> Plan:
    """As AWQ; `dynamic` takes modules out ("-:") or gives them other bits."""
    bits, group = bits_of(table, "bits"), group_of(table)
    plain = integers(bits, group, bits)
    out: list[str] = []
    other: list[tuple[Patterns, Storing]] = []
    dynamic = table.table("dynamic")
    for key in dynamic.raw if dynamic else ():
        if key.startswith("-:"):
            out.append(f"re:{key[2:]}")
        elif dynamic and (inner := dynamic.table(key)):
            own, own_group = bits_of(inner, "bits", default=bits), group_of(inner, default=group)
            named = Patterns([f"re:{key.removeprefix('+:')}"], dynamic, key)
            other.append((named, integers(own, own_group, own)))
    ignored = Patterns([*out, *table.texts("modules_to_not_convert", default=[])], table, "dynamic")
    return Plan(stored=without(by_rule(other, plain), ignored, head=table.flag("lm_head", default=False)))


def by_rule(rules: list[tuple[Patterns, Storing]], otherwise: Storing) -> Storing:
    """By the first of the rules that means the matrix."""
    return lambda module: next((storing for named, storing in rules if module in named), otherwise)(module)


def auto_round(table: Fields) -> Plan:
    """As GPTQ; `extra_config` gives single modules other bits, of which 16 are none."""
    bits, group = bits_of(table, "bits"), group_of(table)
    other: list[tuple[Patterns, Storing]] = []
    extra = table.table("extra_config")
    for key in extra.raw if extra else ():
        inner = extra.table(key) if extra else None
        if extra and inner:
            own, own_group = bits_of(inner, "bits", default=bits), group_of(inner, default=group)
            storing = integers(own, own_group, own) if own < 16 else nothing
            other.append((Patterns([key], extra, key), storing))
    stored = by_rule(other, integers(bits, group, bits))
    return Plan(stored=without(stored, Patterns((), table, "extra_config")))


def nothing(_: Module) -> None:
    """Left as it is."""
    return


def fp8(table: Fields) -> Plan:
    """One 32-bit scale for a block of `weight_block_size`, or for a whole matrix."""
    block = table.integers("weight_block_size", default=[], low=1, high=2**20)
    if block and len(block) != 2:
        raise table.wrong("weight_block_size", f"has {len(block):,} numbers, not two")
    bits = 8 + (WIDE_SCALE / (block[0] * block[1]) if block else 0)
    ignored = patterns_of(table, "modules_to_not_convert", "ignored_layers")
    return Plan(stored=without(uniform("fp8", bits), ignored))


def fbgemm(table: Fields) -> Plan:
    """One 32-bit scale for a row."""
    return Plan(stored=without(grouped("fp8", 8, 0, WIDE_SCALE), patterns_of(table, "modules_to_not_convert")))


def mxfp4(table: Fields) -> Plan:
    """Experts alone (gpt-oss), with a scale of a byte for 32 elements."""
    del table
    return Plan(
        stored=lambda module: Stored(format="mxfp4", bits=4 + BYTE_SCALE / 32) if module.part == "experts" else None
    )


def bitsandbytes(table: Fields) -> Plan:
    """4 bits with a maximum for 64 elements (itself in 8 bits, if doubly quantised), or rows in 8 bits."""
    ignored = patterns_of(table, "llm_int8_skip_modules")
    if table.flag("load_in_4bit", default=False) or table.flag("_load_in_4bit", default=False):
        double = table.flag("bnb_4bit_use_double_quant", default=False)
        scales = 8 / 64 + WIDE_SCALE / (64 * 256) if double else WIDE_SCALE / 64
        return Plan(stored=without(uniform(table.text("bnb_4bit_quant_type", default="fp4"), 4 + scales), ignored))
    if table.flag("load_in_8bit", default=False) or table.flag("_load_in_8bit", default=False):
        return Plan(stored=without(grouped("int8", 8, 0, WIDE_SCALE), ignored))
    raise table.contradiction("neither 4 nor 8 bits", "load_in_4bit", "load_in_8bit")


def exllama(form: str) -> Callable[[Fields], Plan]:
    """`bits` are those of an element with everything; the head has its own."""

    def read(table: Fields) -> Plan:
        layers = Stored(format=form, bits=table.number("bits", low=1, high=16))
        head = Stored(format=form, bits=table.number("head_bits", default=layers.bits, low=1, high=16))
        return Plan(stored=lambda module: head if module.part == "head" else layers)

    return read


_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings")


def mlx(table: Fields) -> Plan:
    """A 16-bit scale and offset for every group, the embedding too; modules by their names have other bits, or none."""
    bits, group = bits_of(table, "bits"), group_of(table, default=64)
    plain = grouped("mlx", bits, group, 2 * SCALE)
    other: list[tuple[Patterns, Storing]] = []
    embedding: Storing = plain
    for key, value in table.raw.items():
        if "." not in key and key != "lm_head":
            continue
        inner = table.table(key) if isinstance(value, dict) else None
        own = grouped("mlx", bits_of(inner, "bits"), group_of(inner, default=group), 2 * SCALE) if inner else nothing
        if key.endswith(_EMBEDDINGS):
            embedding = own
        elif inner or value is False:
            other.append((Patterns([key], table, key), own))
    return Plan(stored=by_rule(other, plain), embedding=embedding)


def hqq(table: Fields) -> Plan:
    """A 16-bit scale and zero for every group."""
    config = table.table("quant_config")
    weights = (config.table("weight_quant_params") if config else None) or config or table
    bits, group = bits_of(weights, "nbits", "bits"), group_of(weights, default=64)
    return Plan(stored=without(integers(bits, group, SCALE), patterns_of(table, "skip_modules")))


_TORCHAO: dict[str, tuple[str, int, int, int]] = {  # format, bits, default group (0: a row), bits of scales
    "int4_weight_only": ("w4a16", 4, 128, 2 * SCALE),
    "int8_weight_only": ("w8a16", 8, 0, SCALE),
    "int8_dynamic_activation_int8_weight": ("int8", 8, 0, SCALE),
    "float8_weight_only": ("fp8", 8, 0, WIDE_SCALE),
    "float8_dynamic_activation_float8_weight": ("fp8", 8, 0, WIDE_SCALE),
}


def torchao(table: Fields) -> Plan:
    """Plain kinds alone: by their name, or by the class of a configuration under `default`."""
    given: Any = table.raw.get("quant_type")
    group = 0
    if isinstance(given, dict):
        kind = table.table("quant_type")
        default = kind.table("default") if kind else None
        if default is None:
            raise table.wrong("quant_type", "has no default")
        name = _snake(default.text("_type").removesuffix("Config"))
        data = default.table("_data")
        group = group_of(data, default=0) if data else 0
    else:
        name = table.text("quant_type")
        arguments = table.table("quant_type_kwargs")
        group = group_of(arguments, default=0) if arguments else 0
    if name not in _TORCHAO:
        raise table.unknown("quant_type", name, _TORCHAO)
    form, bits, by_default, scales = _TORCHAO[name]
    ignored = patterns_of(table, "modules_to_not_convert")
    return Plan(stored=without(grouped(form, bits, group or by_default, scales), ignored))


def _snake(name: str) -> str:
    """Int4WeightOnly -> int4_weight_only."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def nvfp4(table: Fields) -> Plan:
    """A byte for 16 elements."""
    ignored = patterns_of(table, "modules_to_not_convert", "ignore")
    return Plan(stored=without(uniform("nvfp4", 4 + BYTE_SCALE / 16), ignored))


METHODS: dict[str, Callable[[Fields], Plan]] = {
    "awq": awq,
    "gptq": gptq,
    "gptq_marlin": gptq,
    "auto-round": auto_round,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "bitsandbytes": bitsandbytes,
    "exl2": exllama("exl2"),
    "exl3": exllama("exl3"),
    "mlx": mlx,
    "hqq": hqq,
    "torchao": torchao,
}

"""Quantisation by groups of modules: compressed-tensors, and ModelOpt, whose files look alike."""

from twin.models.config.methods import (
    BYTE_SCALE,
    SCALE,
    Plan,
    Storing,
    bits_of,
    by_rule,
    group_of,
    grouped,
    nothing,
    patterns_of,
    uniform,
    without,
)
from twin.models.config.modules import Patterns
from twin.models.fields import Fields

_ALGORITHMS: dict[str, tuple[str, float, int, float]] = {
    "FP8": ("fp8", 8, -1, 0),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", 8, 0, 32),
    "FP8_PB_WO": ("fp8", 8, 128 * 128, 32),
    "NVFP4": ("nvfp4", 4, 16, BYTE_SCALE),
    "NVFP4_AWQ": ("nvfp4", 4, 16, BYTE_SCALE),
    "W4A16_NVFP4": ("nvfp4", 4, 16, BYTE_SCALE),
    "W4A8_NVFP4_FP8": ("nvfp4", 4, 16, BYTE_SCALE),
    "MXFP4": ("mxfp4", 4, 32, BYTE_SCALE),
    "W4A8_MXFP4_FP8": ("mxfp4", 4, 32, BYTE_SCALE),
    "MXFP8": ("mxfp8", 8, 32, BYTE_SCALE),
    "W4A16_AWQ": ("w4a16", 4, 128, SCALE),
    "W4A8_AWQ": ("w4a8", 4, 128, SCALE),
    "W8A16": ("w8a16", 8, 0, SCALE),
    "W8A8_SQ_PER_CHANNEL": ("int8", 8, 0, SCALE),
    "INT8_SQ": ("int8", 8, 0, SCALE),
}
"""ModelOpt's names: format, bits of an element, elements that share a scale (0: a row, -1: the matrix), its bits."""


def modelopt(table: Fields) -> Plan:
    """One algorithm for all matrices that are not excluded, or one for each of those that are listed."""
    inner = table.table("quantization") or table
    listed = inner.table("quantized_layers")
    if listed is not None:
        rules: dict[str, list[str]] = {}
        for key in listed.raw:
            each = listed.table(key)
            if each is None:
                raise listed.wrong(key, "says nothing")
            rules.setdefault(each.text("quant_algo"), []).append(key)
        by_algorithm = [
            (Patterns(names, inner, "quantized_layers"), _algorithm(inner, name)) for name, names in rules.items()
        ]
        return Plan(stored=by_rule(by_algorithm, nothing))
    groups = _groups(inner)
    # several groups, or one with names: each has its own modules
    if groups and (len(groups) > 1 or groups[0][0] is not None):
        return _plan_of(inner, groups)
    storing = _algorithm(inner, inner.text("quant_algo"), group=inner.integer("group_size", default=0, low=0))
    return Plan(stored=without(storing, patterns_of(inner, "exclude_modules", "ignore")))


def _algorithm(table: Fields, name: str, group: int = 0) -> Storing:
    if name not in _ALGORITHMS:
        raise table.unknown("quant_algo", name, _ALGORITHMS)
    form, bits, by_default, scale = _ALGORITHMS[name]
    if by_default < 0:
        return uniform(form, bits)
    return grouped(form, bits, group or by_default, scale)


def compressed_tensors(table: Fields) -> Plan:
    """Groups of modules by class, name or expression, each with its type, bits and what one scale is for."""
    return _plan_of(table, _groups(table))


def _plan_of(table: Fields, groups: list[tuple[Patterns | None, Storing]]) -> Plan:
    """Names before classes; the head is a matrix like others where it is not ignored."""
    if not groups:
        raise table.missing("config_groups")
    named = [(patterns, storing) for patterns, storing in groups if patterns is not None]
    rest = next((storing for patterns, storing in groups if patterns is None), nothing)
    return Plan(stored=without(by_rule(named, rest), patterns_of(table, "ignore"), head=True))


def _groups(table: Fields) -> list[tuple[Patterns | None, Storing]]:
    """Modules of each group, None for all linear ones, and how they are stored."""
    groups = table.table("config_groups")
    found: list[tuple[Patterns | None, Storing]] = []
    for key in groups.raw if groups else ():
        group = groups.table(key) if groups else None
        weights = group.table("weights") if group else None
        if group is None or weights is None:
            continue  # activations or caches alone
        targets = group.texts("targets", default=["Linear"])
        storing = _weights(group, weights, group.text("format", default=table.text("format", default="")))
        classes = any("." not in each and not each.startswith("re:") and each != "lm_head" for each in targets)
        found.append((None if classes else Patterns(targets, group, "targets"), storing))
    return found


def _weights(group: Fields, weights: Fields, form: str) -> Storing:
    """How one group's weights are stored."""
    bits, kind = bits_of(weights, "num_bits"), weights.text("type", default="int")
    size, strategy = group_of(weights, default=0), weights.text("strategy", default="")
    activations = group.table("input_activations")
    zeros = 0 if weights.flag("symmetric", default=True) else bits
    if kind == "float":
        return _floats(weights, bits, size, strategy, form)
    if kind != "int":
        raise weights.unknown("type", kind, ("int", "float"))
    operands = activations.integer("num_bits", default=16, low=1, high=16) if activations else 16
    name = "int8" if (bits, operands) == (8, 8) else f"w{bits}a{operands}"
    if strategy == "tensor":
        return uniform(name, bits)
    if strategy not in {"", "channel", "group"}:
        raise weights.unknown("strategy", strategy, ("tensor", "channel", "group"))
    return grouped(name, bits, size, SCALE + zeros)


def _floats(weights: Fields, bits: int, size: int, strategy: str, form: str) -> Storing:
    """FP8 by matrix, row or block; NVFP4 and MX formats by their groups."""
    if (bits, size) == (4, 16):
        return grouped("nvfp4", bits, size, BYTE_SCALE)
    if size == 32 or form.startswith("mx"):
        return grouped(f"mxfp{bits}", bits, 32, BYTE_SCALE)
    if bits != 8:
        raise weights.wrong("num_bits", f"of floats is {bits} in groups of {size}, which is no known format")
    if strategy == "block":
        rows, columns = [*weights.integers("block_structure", low=1, high=2**20), 1][:2]
        return grouped("fp8", bits, rows * columns, SCALE)
    return grouped("fp8", bits, size, SCALE) if strategy in {"channel", "group"} else uniform("fp8", bits)


SCHEMES = {
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
}

"""Every number that a data file may hold has a least and a most: beyond them arithmetic would end in infinities."""

from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from calibrate.measurements import MeasuredRow
from hwprofiles.profile import HardwareProfile
from twin.models.spec import ModelSpec

ELSEWHERE = {"KernelCase"}
"""Checked as a question is, when it is asked."""


def numbers(kind: Any, path: str, inside: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All number types in a type, with the way there; one `inside` itself has those already."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield path, kind
    elif isinstance(kind, inspect.StructType) and kind.cls.__name__ not in ELSEWHERE and kind.cls not in inside:
        for field in kind.fields:
            yield from numbers(field.type, f"{path}.{field.name}", (*inside, kind.cls))
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from numbers(each, path, inside)
    elif isinstance(kind, inspect.VarTupleType):
        yield from numbers(kind.item_type, f"{path}[]", inside)
    elif isinstance(kind, inspect.DictType):
        yield from numbers(kind.value_type, f"{path}{{}}", inside)


FOUND = {
    found: number
    for kind in (HardwareProfile, ModelSpec, MeasuredRow)
    for found, number in numbers(inspect.type_info(kind), kind.__name__)
}


def test_every_number_of_a_file_has_a_least_and_a_most() -> None:
    for path, kind in FOUND.items():
        most = kind.le if kind.le is not None else kind.lt
        assert kind.ge is not None or kind.gt is not None, path
        assert most is not None, path
        assert abs(most) <= 2**60, path
    assert {"HardwareProfile.kernels{}.efficiency.efficiency[]", "ModelSpec.drafters[].parameters"} <= FOUND.keys()

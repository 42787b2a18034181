"""Every number that a data file may hold has a least and a most: beyond them arithmetic would end in infinities."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from calibrate.measurements import MeasuredRow
from hwprofiles.profile import HardwareProfile
from twin.models.spec import ModelSpec

ELSEWHERE = {"KernelCase"}
"""Checked as a question is, when it is asked."""


def numbers(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All number types in a type, with the way there."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield path, kind
    elif isinstance(kind, inspect.StructType) and kind.cls.__name__ not in ELSEWHERE:
        for field in kind.fields:
            yield from numbers(field.type, f"{path}.{field.name}")
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from numbers(each, path)
    elif isinstance(kind, inspect.VarTupleType):
        yield from numbers(kind.item_type, f"{path}[]")
    elif isinstance(kind, inspect.DictType):
        yield from numbers(kind.value_type, f"{path}{{}}")


KINDS = (HardwareProfile, ModelSpec, MeasuredRow)
FOUND = [found for kind in KINDS for found in numbers(inspect.type_info(kind), kind.__name__)]


@pytest.mark.parametrize(("path", "kind"), FOUND, ids=[path for path, _ in FOUND])
def test_a_number_of_a_file_has_a_least_and_a_most(path: str, kind: Any) -> None:
    least = kind.ge if kind.ge is not None else kind.gt
    most = kind.le if kind.le is not None else kind.lt
    assert least is not None, path
    assert most is not None, path
    assert abs(most) <= 2**60


def test_numbers_are_found_at_any_depth() -> None:
    paths = {path for path, _ in FOUND}
    assert {"HardwareProfile.kernels{}.efficiency.efficiency[]", "ModelSpec.drafters[].parameters"} <= paths

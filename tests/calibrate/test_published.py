"""Published rows are numbers, ranges or a yes or no, each with an id of its own."""

from typing import Any

import msgspec
import pytest

from calibrate.published import Published, Row, read_published


def row(**other: Any) -> dict[str, Any]:
    plain = {"id": "a", "system": "s", "metric": "m", "value": 1, "unit": "s", "source": "x", "conditions": {}}
    return plain | other


def published(*rows: dict[str, Any]) -> Published:
    return msgspec.convert({"schema": "twin.published/1", "note": "", "rows": rows}, Published)


def test_shipped_rows_have_ids_of_their_own() -> None:
    rows = read_published("published_rtx3090.json").rows
    assert len({row.id for row in rows}) == len(rows) == 160


def test_a_range_has_two_ends_and_a_middle() -> None:
    ranged = msgspec.convert(row(value=[15, 20]), Row)
    assert (ranged.low, ranged.middle, ranged.high) == (15, 17.5, 20)


def test_a_number_is_a_range_of_no_width() -> None:
    plain = msgspec.convert(row(value=6.2), Row)
    assert plain.low == plain.middle == plain.high == 6.2


@pytest.mark.parametrize("value", ["fast", None, [1, 2, 3], {"low": 1}])
def test_anything_else_is_no_value(value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match="value"):
        msgspec.convert(row(value=value), Row)


def test_an_id_that_stands_twice_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="row 'a' appears twice"):
        published(row(), row())


def test_another_schema_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"twin\.published/1"):
        msgspec.convert({"schema": "twin.published/2", "note": "", "rows": []}, Published)

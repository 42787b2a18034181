"""The documents say what the records say; a stale one is told by name."""

from pathlib import Path

import pytest

from calibrate import accuracy


def test_the_documents_are_what_the_records_say() -> None:
    assert accuracy.main(["--check"]) == 0


def test_a_stale_document_is_named_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{accuracy.BEGIN}old{accuracy.END}after\n")
    for name, path in (("ROOT", tmp_path), ("README", readme), ("DOCUMENT", tmp_path / "docs" / "accuracy.md")):
        monkeypatch.setattr(accuracy, name, path)
    assert accuracy.main(["--check"]) == 1
    assert capsys.readouterr().out.count("is not what the records say") == 2
    assert accuracy.main([]) == 0
    assert accuracy.main(["--check"]) == 0
    assert readme.read_text().startswith("before\n")
    assert readme.read_text().endswith("after\n")

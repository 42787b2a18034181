"""A file is written whole or not at all, whatever fails and whatever is there already."""

import errno
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from twin.errors import BadFile, BadValue, CannotWrite
from twin.render.output import check_apart, open_atomic, write_atomic

NEEDS_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
OLD, NEW = "old\n", "new: ü, 日本\n"


def test_text_is_written_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    write_atomic(path, NEW)
    assert path.read_bytes() == NEW.encode()
    assert os.listdir(tmp_path) == ["answer"]


def test_an_old_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    path.chmod(0o604)
    write_atomic(path, NEW)
    assert path.read_text(encoding="utf-8") == NEW
    assert path.stat().st_mode & 0o777 == 0o604


def test_a_reader_of_the_old_file_keeps_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    with path.open(encoding="utf-8") as reader:
        write_atomic(path, NEW)
        assert reader.read() == OLD


@pytest.mark.parametrize("fails", ["fsync", "replace", "chmod", "fdopen"])
def test_whatever_fails_the_old_file_stays_and_nothing_lies_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    monkeypatch.setattr(Path if fails in {"replace", "chmod"} else os, fails, full)
    with pytest.raises(CannotWrite, match="No space left on device") as refused:
        write_atomic(path, NEW)
    monkeypatch.undo()
    assert str(path) in refused.value.message
    assert path.read_text(encoding="utf-8") == OLD
    assert os.listdir(tmp_path) == ["answer"]


def test_an_interruption_leaves_nothing_beside_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(_: int) -> NoReturn:
        raise KeyboardInterrupt

    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, NEW)
    assert path.read_text(encoding="utf-8") == OLD
    assert os.listdir(tmp_path) == ["answer"]


@pytest.mark.parametrize("where", ["nowhere/answer", "answer-long" * 30])
def test_where_no_file_can_be_nothing_is_written(tmp_path: Path, where: str) -> None:
    with pytest.raises(CannotWrite, match="cannot write"):
        write_atomic(tmp_path / where, NEW)
    assert os.listdir(tmp_path) == []


def test_a_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotWrite, match="cannot write"):
        write_atomic(tmp_path / "folder", NEW)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text(OLD, encoding="utf-8")
    link.symlink_to(target)
    write_atomic(link, NEW)
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == NEW
    assert os.listdir(target.parent) == ["target"]


def test_a_link_to_nothing_yet_gets_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_atomic(link, NEW)
    assert link.is_symlink()
    assert (tmp_path / "target").read_text(encoding="utf-8") == NEW


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(CannotWrite, match="cannot write"):
        write_atomic(link, NEW)
    assert link.is_symlink()


@NEEDS_PIPES
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    path, text = tmp_path / "pipe", NEW * 50_000  # more than a pipe holds
    os.mkfifo(path)
    heard: list[str] = []
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    held_open = os.open(path, os.O_WRONLY)  # without any writer a reader is at its end at once
    with os.fdopen(reader, encoding="utf-8") as stream:
        listener = threading.Thread(target=lambda: heard.append(stream.read()))
        listener.start()
        write_atomic(path, text)
        os.close(held_open)
        listener.join()
    assert heard == [text]
    assert path.is_fifo()


@NEEDS_PIPES
def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(CannotWrite, match="cannot write"):
        write_atomic(path, NEW)
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


@NEEDS_PIPES
def test_a_pipe_whose_reader_leaves_is_a_closed_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BrokenPipeError), open_atomic(path) as out:  # noqa: PT012
        os.close(reader)
        out.write(NEW)


def test_a_file_written_piece_by_piece_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    with open_atomic(path) as out:
        for piece in NEW:
            out.write(piece)
        out.flush()
        assert path.read_text(encoding="utf-8") == OLD
    assert path.read_text(encoding="utf-8") == NEW


@pytest.mark.parametrize("wrong", [BadFile("mine.jsonl:2: broken"), KeyboardInterrupt(), ZeroDivisionError()], ids=str)
def test_a_block_that_ends_badly_leaves_the_old_file_and_its_own_exception(
    tmp_path: Path, wrong: BaseException
) -> None:
    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    with pytest.raises(type(wrong)) as raised, open_atomic(path) as out:  # noqa: PT012
        out.write(NEW)
        raise wrong
    assert raised.value is wrong
    assert path.read_text(encoding="utf-8") == OLD
    assert os.listdir(tmp_path) == ["answer"]


def test_two_files_written_at_once_are_both_whole(tmp_path: Path) -> None:
    with open_atomic(tmp_path / "one") as one, open_atomic(tmp_path / "two") as two:
        one.write(OLD)
        two.write(NEW)
    assert (tmp_path / "one").read_text(encoding="utf-8") == OLD
    assert (tmp_path / "two").read_text(encoding="utf-8") == NEW


def test_one_file_under_two_names_is_taken_once(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    link.symlink_to(there)
    for path in (there, link, tmp_path / "." / "there"):
        with pytest.raises(BadValue, match="--one and --two name one file: "):
            check_apart({"--one": there, "--none": None, "--two": path})


def test_files_apart_and_devices_are_no_conflict(tmp_path: Path) -> None:
    null = Path(os.devnull)
    check_apart({"--one": tmp_path / "one", "--two": tmp_path / "two", "--three": None})
    check_apart({"--one": null, "--two": null})
    check_apart({"--one": tmp_path, "--two": tmp_path / "nowhere" / "one"})

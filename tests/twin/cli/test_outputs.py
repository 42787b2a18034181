"""Streams take every byte or say that they could not; a file is written whole or not at all, whatever fails."""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from twin.cli import outputs
from twin.cli.outputs import UNFINISHED, Whole, check_outputs, check_writable, open_atomic, text_into, write_atomic
from twin.errors import BadFile, BadValue, CannotWrite

TEXT = "line: ü, 日本\n" * 20_000


@contextmanager
def heard_from(reader: int) -> Iterator[list[str]]:
    """All that a thread has read from a pipe by the end."""
    heard: list[str] = []
    with os.fdopen(reader, encoding="utf-8") as stream:
        listener = threading.Thread(target=lambda: heard.append(stream.read()))
        listener.start()
        yield heard
        listener.join()


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with heard_from(reader) as heard, text_into(Whole(writer, "it")) as out:
        out.write(TEXT)
    assert heard == [TEXT]


def test_what_is_taken_in_part_is_written_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system may take one byte at a time."""
    path = tmp_path / "file"
    whole = Whole.write
    monkeypatch.setattr(Whole, "write", lambda self, data: whole(self, bytes(data)[:1]))
    with text_into(Whole(os.open(path, os.O_WRONLY | os.O_CREAT), path)) as out:
        out.write(TEXT[:100])
    assert path.read_text(encoding="utf-8") == TEXT[:100]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told_once_and_names_what_was_written() -> None:
    raw = Whole(os.open("/dev/full", os.O_WRONLY), "the list")
    with text_into(raw) as out:
        with pytest.raises(CannotWrite, match="cannot write the list: No space left on device"):
            out.write(TEXT)
        assert raw.write(b"more") == 4


def test_a_name_that_is_no_text_is_spelled_out() -> None:
    kept = io.BytesIO()
    out = text_into(kept, encoding="ascii")  # type: ignore[arg-type]
    out.write("a\udcff ü")
    out.flush()
    assert kept.getvalue() == b"a\\udcff \\xfc"


FILES = """
import os, pathlib, sys
from twin.cli.outputs import standard_streams
with standard_streams():
    file = open(sys.argv[1], "w")
    assert file.fileno() > 2, file.fileno()
    sys.stderr.write("a remark\\n")
    sys.stderr.flush()
    try:
        sys.stdout.write("an answer\\n")
        sys.stdout.flush()
    except OSError as wrong:
        file.write(str(wrong))
"""


@pytest.mark.parametrize("shut", ["", "<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path: Path, shut: str) -> None:
    file = tmp_path / "file"
    shell = ["sh", "-c", f'exec "$@" {shut}', "sh", sys.executable, "-c", FILES, str(file)]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "" if "2>" in shut else "a remark\n")
    closed = " >" in f" {shut}"
    assert done.stdout == ("" if closed else "an answer\n")
    assert file.read_text(encoding="utf-8") == ("cannot write standard output: Bad file descriptor" if closed else "")


NEEDS_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
OLD, NEW = "old\n", "new: ü, 日本\n"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def answer(tmp_path: Path) -> Path:
    """An old file, alone in its folder."""
    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    return path


def assert_alone(path: Path, text: str) -> None:
    """The file holds the text, and nothing lies beside it."""
    assert path.read_text(encoding="utf-8") == text
    assert os.listdir(path.parent) == [path.name]


def test_an_old_file_is_replaced_and_keeps_its_mode_and_its_readers(answer: Path) -> None:
    answer.chmod(0o604)
    with answer.open(encoding="utf-8") as reader:
        write_atomic(answer, NEW)
        assert reader.read() == OLD
    assert_alone(answer, NEW)
    assert answer.stat().st_mode & 0o777 == 0o604


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize(("module", "call"), [(os, "fsync"), (Path, "replace"), (Path, "chmod"), (os, "open")])
def test_whatever_fails_the_old_file_stays_and_nothing_lies_beside_it(
    monkeypatch: pytest.MonkeyPatch, answer: Path, module: Any, call: str, error: BaseException
) -> None:
    def failing(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(module, call, failing)
    told, says = (CannotWrite, f"{answer}: No space left on device") if error is FULL else (KeyboardInterrupt, None)
    with pytest.raises(told, match=says):
        write_atomic(answer, NEW)
    monkeypatch.undo()
    assert_alone(answer, OLD)


@NEEDS_PIPES
@pytest.mark.parametrize("where", ["nowhere/answer", "answer-long" * 30, "folder", "pipe"])
def test_where_no_file_can_be_nothing_is_written(tmp_path: Path, where: str) -> None:
    """Neither where a folder is, nor into a pipe that nobody reads."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CannotWrite, match="cannot write"):
        write_atomic(tmp_path / where, NEW)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
    assert (tmp_path / "folder").is_dir()
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_whether_its_target_is_there_or_not(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text(OLD, encoding="utf-8")
    link.symlink_to(target)
    write_atomic(link, NEW)
    assert link.is_symlink()
    assert_alone(target, NEW)


@NEEDS_PIPES
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    path, text = tmp_path / "pipe", NEW * 50_000  # more than a pipe holds
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    held_open = os.open(path, os.O_WRONLY)  # without any writer a reader is at its end at once
    with heard_from(reader) as heard:
        write_atomic(path, text)
        os.close(held_open)
    assert heard == [text]
    assert path.is_fifo()


@NEEDS_PIPES
def test_a_pipe_whose_reader_leaves_is_a_closed_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BrokenPipeError), open_atomic(path) as out:  # noqa: PT012
        os.close(reader)
        out.write(NEW)


@pytest.mark.parametrize("wrong", [BadFile("mine.jsonl:2: broken"), KeyboardInterrupt(), IsADirectoryError("read")])
def test_a_block_that_ends_badly_leaves_the_old_file_and_its_own_exception(answer: Path, wrong: BaseException) -> None:
    with pytest.raises(type(wrong)) as raised, open_atomic(answer) as out:  # noqa: PT012
        out.write(NEW)
        raise wrong
    assert raised.value is wrong
    assert_alone(answer, OLD)


def test_one_file_under_two_names_is_taken_once(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    link.symlink_to(there)
    for make in (lambda: None, lambda: there.write_text(OLD, encoding="utf-8"), there.unlink, lambda: os.mkfifo(there)):
        make()
        for path in (there, link, tmp_path / "." / "there"):
            with pytest.raises(BadValue, match="--one and -o name one file: "):
                check_outputs(path, beside={"--none": None, "--one": there})
            with pytest.raises(BadValue, match="--one and --two name one file: "):
                check_outputs(None, beside={"--one": there, "--two": path})
            with pytest.raises(BadValue, match="--in and -o name one file: "):
                check_outputs(path, read={"--in": there})
    check_outputs(there)  # one document may go into a pipe


def test_files_apart_and_the_null_device_are_no_conflict_and_checking_leaves_old_files_alone(answer: Path) -> None:
    null, before = Path(os.devnull), answer.stat()
    check_outputs(answer, beside={"--one": answer.parent / "one", "--two": answer.parent / "two"})
    check_outputs(null, beside={"--one": null, "--two": null}, read={"--in": null})
    check_outputs(None, read={"--in": answer.parent / "one", "--none": None})
    assert (answer.stat().st_ino, answer.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert_alone(answer, OLD)


@pytest.mark.parametrize(
    ("where", "says"),
    [("nowhere/answer", "No such file or directory"), (".", "it is a folder"), ("file/answer", "Not a directory"),
     ("a" * 300, "File name too long"), ("circle", "Too many levels of symbolic links")],
)  # fmt: skip
def test_what_cannot_be_written_is_known_before_and_nothing_is_changed(tmp_path: Path, where: str, says: str) -> None:
    (tmp_path / "file").write_text(OLD, encoding="utf-8")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for asked in (check_outputs, lambda path: check_outputs(None, beside={"--one": path})):
        with pytest.raises(CannotWrite, match=says):
            asked(tmp_path / where)
    assert sorted(os.listdir(tmp_path)) == ["circle", "file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == OLD


def test_a_folder_that_takes_no_file_is_known_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, opened = tmp_path / "answer", os.open

    def read_only(where: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(where, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(CannotWrite, match=f"cannot write {path}: Read-only file system"):
        check_writable(path)


@pytest.mark.parametrize("name", ["answer", "a" * 255, "ä" * 127], ids=["short", "long", "long of two bytes"])
def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path, name: str) -> None:
    killed_while_writing(tmp_path / name)
    assert len(os.listdir(tmp_path)) == 1
    write_atomic(tmp_path / name, NEW)
    assert_alone(tmp_path / name, NEW)


def test_what_a_living_process_writes_is_not_swept(answer: Path) -> None:
    with open_atomic(answer) as slow:
        slow.write("slow")
        slow.flush()
        write_atomic(answer, NEW)
        assert answer.read_text(encoding="utf-8") == NEW
        assert len(os.listdir(answer.parent)) == 2
    assert_alone(answer, "slow")


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    """Neither another target's, nor a user's own file, nor a folder or a link of such a name."""
    killed_while_writing(tmp_path / "answers")
    killed_while_writing(tmp_path / "other")
    (tmp_path / ".answer.mine").write_text(OLD, encoding="utf-8")
    (tmp_path / f".answer.folder{UNFINISHED}").mkdir()
    (tmp_path / f".answer.link{UNFINISHED}").symlink_to(tmp_path / ".answer.mine")
    before = sorted(os.listdir(tmp_path))
    write_atomic(tmp_path / "answer", NEW)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "answer"])


def test_a_file_swept_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between making and locking a file another process may take it for one that was left."""
    path, swept = tmp_path / "answer", []

    def late(_: int, *, wait: bool) -> bool:
        if wait and not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        return True

    monkeypatch.setattr(outputs, "_lock", late)
    write_atomic(path, NEW)
    assert len(swept) == 1
    assert_alone(path, NEW)


def killed_while_writing(path: Path) -> None:
    """A process that is killed in the middle of a file."""
    code = (
        "import os, pathlib, signal, sys; from twin.cli.outputs import open_atomic\n"
        "with open_atomic(pathlib.Path(sys.argv[1])) as out: out.write('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL

"""Files that are whole at any moment, written by many processes or under a kill, and locks that keep others out."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal

import pytest

from vlmrm import files
from vlmrm.errors import ConfigError
from vlmrm.files import atomic_write, exclusive_lock, make_folder, write_file, write_json

FORK = multiprocessing.get_context("fork")


def run(target, *args) -> int | None:
    """Return how a process that called `target` ended."""
    process = FORK.Process(target=target, args=args)
    process.start()
    process.join(30)
    return process.exitcode


@pytest.mark.parametrize("durable", [True, False])
def test_a_kill_before_replacing_leaves_the_old_file(tmp_path, durable):
    path = tmp_path / "results.json"
    write_json(path, {"old": True})

    def killed():
        files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_json(path, {"new": "x" * 10**6}, durable=durable)

    assert run(killed) == -signal.SIGKILL
    assert json.loads(path.read_text()) == {"old": True}
    [left] = set(tmp_path.iterdir()) - {path}
    assert left.name.startswith(".") and left.suffix == ".tmp"
    write_json(path, {"new": True})
    assert json.loads(path.read_text()) == {"new": True}


def test_a_full_disk_is_one_sentence_leaving_nothing(tmp_path):
    path = tmp_path / "results.csv"
    write_file(path, "old")
    answers = FORK.SimpleQueue()

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the system then refuses to write, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_file(path, "x" * 2000)
        except ConfigError as error:
            answers.put(str(error))

    assert run(fill) == 0
    assert answers.get() == f"{path} cannot be written (File too large): free some space, or choose another path."
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exclusive", [True, False])
def test_concurrent_writers_leave_the_file_of_one(tmp_path, exclusive):
    path, sizes = tmp_path / "scores", {str(n) * 10**5 for n in range(8)}
    start = FORK.Barrier(len(sizes))

    def write(text):
        start.wait()
        for _ in range(20):
            write_file(path, text, durable=False, exclusive=exclusive)
            assert path.read_text() in sizes

    writers = [FORK.Process(target=write, args=(text,)) for text in sizes]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * len(sizes)
    assert list(tmp_path.iterdir()) == [path]


def test_where_it_is_exclusive_the_first_file_stays(tmp_path):
    path = tmp_path / "settings.json"
    write_json(path, {"first": 1}, exclusive=True)
    write_json(path, {"second": 2}, exclusive=True)
    assert json.loads(path.read_text()) == {"first": 1} and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "table"
    write_file(path, b"old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=f"{path} cannot be written"):
            write_file(path, "text")
    with pytest.raises(ConfigError, match="file cannot be written"):
        make_folder(tmp_path / "file")


def test_a_second_writer_is_refused_while_one_lives(tmp_path):
    lock, holding = tmp_path / "out" / "run.lock", FORK.Event()

    def hold():
        with exclusive_lock(lock, "never said"):
            holding.set()
            signal.pause()

    first = FORK.Process(target=hold)
    first.start()
    assert holding.wait(30)
    with (
        pytest.raises(ConfigError, match=r"^another is writing$"),
        exclusive_lock(lock, "another is writing", wait=0.1),
    ):
        pytest.fail("two write at once")
    first.kill()
    with exclusive_lock(lock, "another is writing", wait=30):
        assert lock.exists()
    with exclusive_lock(lock, "another is writing"):
        pass

"""What befalls a launch from outside: a lost rank, a killed worker, no folder for logs, a dead launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys

import pytest
from torch import distributed

from vlmrm import logs
from vlmrm.batching.collator import plain_worker_errors
from vlmrm.errors import TrainingError, VlmrmError
from vlmrm.training.folder import plain_rank_errors
from vlmrm.training.main import end_with_launcher

GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:17626. GLHF!"


def test_a_rank_losing_another_says_so(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda *group: 1)
    for error in (RuntimeError(GLOO), distributed.DistBackendError("NCCL error: remote process exited")):
        sentence = r"rank 1 lost another process .* --resume_from_checkpoint auto"
        with pytest.raises(TrainingError, match=sentence), plain_rank_errors():
            raise error
    with pytest.raises(RuntimeError, match="of another kind"), plain_rank_errors():
        raise RuntimeError("of another kind")


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_worker_killed_handing_over_batches_is_named(error):
    with pytest.raises(VlmrmError, match="a DataLoader worker was killed"), plain_worker_errors():
        raise error


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert logs.start_log("train") is None
    logging.getLogger("vlmrm").info("goes on")
    assert "There is no log file" in (output := capsys.readouterr().err) and "goes on" in output


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's death")
def test_a_rank_is_stopped_when_its_launcher_dies(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    reads, writes = os.pipe()
    if not (launcher := os.fork()):
        if not os.fork():
            end_with_launcher()
            signal.signal(signal.SIGTERM, lambda *args: (os.write(writes, b"SIGTERM"), os._exit(0)))
            os.write(writes, b"ready ")
            signal.sigtimedwait([], 30.0)
            os._exit(1)
        signal.pause()
    os.close(writes)
    assert os.read(reads, 6) == b"ready "
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert os.read(reads, 7) == b"SIGTERM"

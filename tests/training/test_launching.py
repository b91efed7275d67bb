"""What befalls a launch from outside: a lost rank, no memory, a full disk of logs, closed streams, a dead launcher."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import short_training
from torch import distributed

from vlmrm import logs
from vlmrm.batching.collator import plain_worker_errors
from vlmrm.errors import TrainingError, VlmrmError
from vlmrm.training.arguments import RunArguments
from vlmrm.training.checks import check_required
from vlmrm.training.folder import plain_rank_errors
from vlmrm.training.main import end_with_launcher, is_out_of_memory
from vlmrm.training.plan import launch

GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:17626. GLHF!"


def test_a_rank_that_lost_another_says_so_and_other_errors_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda *group: 1)
    for error in (RuntimeError(GLOO), distributed.DistBackendError("NCCL error: remote process exited")):
        sentence = r"rank 1 lost another process .* --resume_from_checkpoint auto"
        with pytest.raises(TrainingError, match=sentence), plain_rank_errors():
            raise error
    with pytest.raises(RuntimeError, match="of another kind"), plain_rank_errors():
        raise RuntimeError("of another kind")


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_worker_killed_while_it_hands_over_a_batch_is_named(error):
    with pytest.raises(VlmrmError, match="a DataLoader worker was killed"), plain_worker_errors():
        raise error


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_want_of_memory_is_known_by_its_words(error, memory):
    assert is_out_of_memory(error) == memory


@pytest.mark.parametrize(
    ("keys", "remark"),
    [({"learning_rate": 0}, "nothing is learned"), ({"max_steps": 5, "warmup_steps": 5}, "never reaches its value")],
)
def test_a_rate_that_teaches_nothing_is_remarked(tmp_path, keys, remark):
    run = RunArguments.parse(short_training(tmp_path, tmp_path / "rows.jsonl", tmp_path / "out", **keys), "train")
    assert [remark in said for said in check_required(run)] == [True]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert logs.start_log("train") is None
    logging.getLogger("vlmrm").info("goes on")
    assert "There is no log file" in (output := capsys.readouterr().err) and "goes on" in output

    (tmp_path / "logs").unlink()
    assert logs.start_log("train") is not None
    [file] = [handler for handler in logging.getLogger("vlmrm").handlers if isinstance(handler, logging.FileHandler)]

    file.setStream(Full())
    for number in range(3):
        logging.getLogger("vlmrm").info("line %d", number)
    output = capsys.readouterr().err
    assert output.count("cannot be written any more") == 1 and "Traceback" not in output and "line 2" in output


class Full:
    """A file on a full disk."""

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


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


def test_a_plan_says_what_starts_the_processes(tmp_path, tiny_checkpoint, monkeypatch):
    run = RunArguments.parse(short_training(tiny_checkpoint, "x", tmp_path / "out"), "test")
    assert launch(run, 1) == "1 process: vlmrm train FILE"
    assert launch(run, 4) == "4 processes with DDP: ./run_distributed.sh --gpus 4 --config FILE"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launch(run, 4) == "4 processes with DDP, of which this is number 3"


def test_trainings_that_are_killed_end_as_uninterrupted_ones(tmp_path):
    """A few of what `python drives/kills.py` does a hundred times."""
    program = Path(__file__).parents[2] / "drives/kills.py"
    words = ["--kills", "2", "--in_saves", "0.5", "--seed", "3", "--kinds", "full", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills: " in done.stdout and " 0 human steps, 0 tracebacks" in done.stdout

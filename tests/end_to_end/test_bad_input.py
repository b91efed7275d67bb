"""Whatever a person gets wrong ends in one sentence and an exit code, and loses nothing that was saved."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal

import pytest
from PIL import Image
from torch.utils.data import get_worker_info

from tests.runs import colour_pairs, finish, short_training, start, words, write_rows
from vlmrm import cli
from vlmrm.commands.demo import run_demo
from vlmrm.errors import TrainingError
from vlmrm.rendering import Renderer


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """`refused(code, verb, *words)` runs a command that must end with `code`, and returns its sentence."""
    monkeypatch.chdir(tmp_path)

    def run(code: int, verb: str, *arguments: str) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.run(lambda: cli.app([verb, *arguments], exit_on_error=False))
        output = capfd.readouterr().err
        assert "Traceback" not in output, output
        [sentence] = [line for line in output.splitlines() if line.startswith("error: ")]
        assert output.rstrip().endswith(sentence), f"something follows the sentence:\n{output}"
        assert stopped.value.code == code, sentence
        return sentence

    return run


@pytest.fixture
def training(tiny_checkpoint, tmp_path):
    """The words of a short training on rows that `change` has spoilt."""

    def make(change=None, **keys) -> list[str]:
        data = colour_pairs(tmp_path / "data", 4)
        if change is not None:
            rows = [json.loads(line) for line in data.read_text().splitlines()]
            change(rows[2], tmp_path / "data")
            write_rows(data, rows)
        return short_training(tiny_checkpoint, data, tmp_path / "out", **keys)

    return make


def narrow_image(row, folder):
    Image.new("RGB", (28, 28 * 250)).save(folder / row["images"][0])


def test_a_bad_image_in_workers_is_one_sentence(refused, training):
    sentence = refused(3, "train", *training(narrow_image, dataloader_num_workers=2))
    assert sentence.startswith("error: row pair-2: ") and "28x7000" in sentence


def test_a_worker_that_dies_is_named(refused, training, monkeypatch):
    render = Renderer.render

    def die(self, messages, cache=None):
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        return render(self, messages, cache)

    monkeypatch.setattr("vlmrm.rendering.Renderer.render", die)
    sentence = refused(1, "train", *training(dataloader_num_workers=1))
    assert "a DataLoader worker was killed" in sentence and "dataloader_num_workers" in sentence


def kept(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("verb", ["init-tiny", "demo"])
def test_commands_never_overwrite_folders_of_others(refused, tiny_reward_model, tmp_path, verb):
    folder = shutil.copytree(tiny_reward_model, tmp_path / "mine")
    shutil.copytree(folder, folder / "training/best")
    (folder / "report").mkdir()
    (folder / "report/notes.txt").write_text("mine")
    before = kept(folder)
    words = {"init-tiny": [str(folder)], "demo": ["--output", str(folder)]}[verb]
    assert f"{folder} is not empty" in refused(2, verb, *words)
    assert kept(folder) == before


@pytest.mark.smoke
def test_an_earlier_demo_is_replaced(tmp_path, monkeypatch, capsys):
    """Also one that was interrupted."""

    class Interrupted(Exception):
        pass

    def interrupt(*args, **kwargs):
        raise Interrupted

    monkeypatch.setattr("vlmrm.commands.demo.train", interrupt)
    for _ in range(2):
        with pytest.raises(Interrupted):
            run_demo(tmp_path / "demo")
        (tmp_path / "demo/training/checkpoint-1").mkdir(parents=True)
    assert "replacing" in capsys.readouterr().out
    assert (tmp_path / "demo/data/train_answers.jsonl").exists()


def test_a_nonfinite_loss_stops_the_run_keeping_checkpoints(refused, training, tmp_path):
    # The first step of the warmup has a rate of zero.
    rate = {"learning_rate": 1e30, "warmup_steps": 2, "max_grad_norm": 0.0}
    sentence = refused(5, "train", *training(save_steps=1, max_steps=20, **rate))
    assert "learning_rate" in sentence and str(tmp_path / "out") in sentence
    assert [path.parent.name for path in (tmp_path / "out").glob("*/COMPLETE.json")] == ["checkpoint-1"]

    sentence = refused(5, "train", *training(output_dir=tmp_path / "unsaved", max_steps=20, **rate))
    assert "the loss is" in sentence and "learning_rate" in sentence


def test_an_evaluation_without_finite_scores_names_the_row(refused, training, tmp_path):
    held_out = colour_pairs(tmp_path / "eval", 3)
    keys = {"eval_dataset_path": held_out, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    sentence = refused(5, "train", *training(**keys, max_steps=20, learning_rate=1e30, max_grad_norm=0.0))
    assert "after step 1" in sentence and "row pair-0" in sentence and "learning_rate" in sentence


def test_weights_without_finite_scores_are_not_complete(refused, training, tmp_path):
    """The loss of the step was finite: what its update made of the weights shows in the next forward only."""
    keys = {"save_steps": 1, "learning_rate": 1e30, "max_grad_norm": 0.0}
    for resume in ("false", "auto"):
        sentence = refused(5, "train", *training(**keys, max_steps=1, resume_from_checkpoint=resume))
        assert "after step 1" in sentence and "learning_rate" in sentence
        assert not list((tmp_path / "out").glob("*/COMPLETE.json"))


def test_a_disk_that_fills_spares_earlier_checkpoints(tmp_path, tiny_checkpoint):
    """The kernel refuses to write past a limit, as a full disk does: here in the optimizer."""
    data = colour_pairs(tmp_path / "data", 4)
    first = short_training(tiny_checkpoint, data, tmp_path / "out", max_steps=2, save_steps=2)
    finish(start(["train_rm.py"], *first, cwd=tmp_path))
    before = {path: path.read_bytes() for path in (tmp_path / "out/checkpoint-2").rglob("*") if path.is_file()}

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    again = short_training(tiny_checkpoint, data, tmp_path / "out", max_steps=4, save_steps=2)
    process = start(["train_rm.py"], *again, *words(resume_from_checkpoint="auto"), cwd=tmp_path, preexec_fn=limit)
    output = finish(process, 5)
    assert "Traceback" not in output
    assert output.rstrip().splitlines()[-1].startswith(f"error: {tmp_path}/out/checkpoint-4 could not be saved: ")
    assert not (tmp_path / "out/checkpoint-4/COMPLETE.json").exists()
    assert before == {path: path.read_bytes() for path in before}


def test_running_out_of_accelerator_memory_advises_fewer_tokens(train_here, tmp_path, monkeypatch):
    import torch

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("vlmrm.training.step.TrainingStep.__call__", no_memory)
    with pytest.raises(TrainingError, match="max_tokens_per_batch"):
        train_here(colour_pairs(tmp_path / "data", 4))

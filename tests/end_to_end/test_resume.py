"""A run that is killed, preempted or left with a broken checkpoint goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.runs import (
    assert_equal_weights,
    colour_lists,
    colour_pairs,
    finish,
    largest_difference,
    logged,
    short_training,
    start,
    train,
)
from vlmrm.errors import CheckpointError, ConfigError, Interrupted
from vlmrm.modeling import make_tiny, write_complete

KILLED = Path(__file__).with_name("killed_training.py")
LONG = {"max_steps": 14, "save_steps": 4, "use_irrelevant_queries": True}
# With an epoch of five steps: within the second, at its end, and in the third.
KINDS = {
    "full": (6, {}),
    "lora": (10, {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1}),  # dropout: the random state is restored too
}


def terminate_after(steps: int, process) -> None:
    """Sends SIGTERM when the figures of `steps` steps were printed, by when there may be more."""
    text = []
    assert process.stdout is not None
    for printed in process.stdout:
        text.append(printed)
        steps -= printed.startswith("step ")
        if steps == 0:
            process.terminate()
            return
    raise AssertionError(f"it ended before:\n{''.join(text)}")


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_step_and_resumed_equals_uninterrupted(tmp_path, tiny_checkpoint, train_here, kind):
    data = colour_lists(tmp_path / "data", 10)
    step, keys = KINDS[kind]
    keys = {**LONG, **keys}
    arguments = short_training(tiny_checkpoint, data, tmp_path / "out", **keys)
    finish(start([str(KILLED), str(step)], *arguments, cwd=tmp_path), -signal.SIGKILL)
    saved = {folder.name for folder in (tmp_path / "out").glob("checkpoint-*")}
    assert saved == {f"checkpoint-{saved_step}" for saved_step in (4, 8, 12) if saved_step < step}
    train_here(data, **keys, resume_from_checkpoint="auto")
    train_here(data, "whole", **keys)
    uninterrupted, resumed = (tmp_path / name / "checkpoint-14" for name in ("whole", "out"))
    assert_equal_weights(uninterrupted, resumed)
    for name in ("loss", "num_tokens", "irrelevant_margin"):
        assert logged(resumed, name) == logged(uninterrupted, name), f"{name}, killed at step {step}"


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_the_next_step_of_every_rank(tmp_path, tiny_checkpoint, processes):
    data = colour_pairs(tmp_path / "data", 12)
    constant = {"lr_scheduler_type": "constant", "save_steps": 4000}  # else the rate would depend on max_steps

    def run(name: str, **keys) -> list[str]:
        return short_training(tiny_checkpoint, data, tmp_path / name, **constant, **keys)

    process = start(["train_rm.py"], *run("out", max_steps=4000), cwd=tmp_path, processes=processes)
    terminate_after(3, process)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 143 if processes == 1 else process.returncode != 0
    [saved] = (tmp_path / "out").glob("checkpoint-*")
    assert output.count(f"error: stopped by SIGTERM after saving {saved}") == processes
    assert json.loads((saved / "COMPLETE.json").read_text())["world_size"] == processes
    assert not (tmp_path / "out/final").exists()

    step = int(saved.name.split("-")[1])
    train(*run("out", max_steps=step + 3, resume_from_checkpoint="auto"), cwd=tmp_path, processes=processes)
    train(*run("whole", max_steps=step + 3), cwd=tmp_path, processes=processes)
    assert_equal_weights(tmp_path / "out/final", tmp_path / "whole/final")


def test_a_second_training_is_refused_while_one_lives(tmp_path, tiny_checkpoint, train_here, monkeypatch):
    data = colour_pairs(tmp_path / "data", 10)
    arguments = short_training(tiny_checkpoint, data, tmp_path / "out", max_steps=4000, save_steps=4000)
    process = start(["train_rm.py"], *arguments, cwd=tmp_path)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step "))
    with monkeypatch.context() as patched:
        patched.setattr("vlmrm.training.folder.LOCK_SECONDS", 0.1)
        for resume in ("false", "auto"):
            with pytest.raises(ConfigError, match=f"another training is writing into {tmp_path / 'out'}"):
                train_here(data, resume_from_checkpoint=resume)
    assert process.poll() is None
    process.kill()
    process.communicate()
    train_here(data, max_steps=1, resume_from_checkpoint="auto")


@pytest.fixture
def two_checkpoints(train_here, tmp_path):
    """A finished run with checkpoint-2 and checkpoint-4, and the data it saw."""
    data = colour_pairs(tmp_path / "data", 8)
    train_here(data, max_steps=4, save_steps=2)
    return tmp_path / "out", data


def damage(folder: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(folder / "model.safetensors", 1000)
    else:
        (folder / how).unlink()


@pytest.mark.parametrize("how", ["truncated", "COMPLETE.json", "optimizer.pt"])
def test_a_broken_newest_checkpoint_is_named_and_skipped(two_checkpoints, train_here, capsys, how):
    out, data = two_checkpoints
    shutil.copytree(out / "checkpoint-4", out.parent / "whole-4")
    damage(out / "checkpoint-4", how)
    shutil.rmtree(out / "final")
    capsys.readouterr()
    train_here(data, max_steps=4, save_steps=2, resume_from_checkpoint="auto")
    log = capsys.readouterr().err
    assert "skipping checkpoint-4" in log and f"Resuming from {out / 'checkpoint-2'}" in log
    assert_equal_weights(out / "checkpoint-4", out.parent / "whole-4")


def test_a_run_killed_in_its_first_save_restarts(train_here, tmp_path, capsys, monkeypatch):
    data = colour_pairs(tmp_path / "data", 8)
    keys = {"max_steps": 4, "save_steps": 2}
    train_here(data, "whole", **keys)

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("vlmrm.training.folder.write_complete", die)
        with pytest.raises(Interrupted, match="interrupted after step 2, and no checkpoint was saved"):
            train_here(data, **keys)
    half_written = tmp_path / "out/checkpoint-2"
    os.truncate(half_written / "model.safetensors", 1000)
    (half_written / "model-00001-of-00002.safetensors").write_text("of another layout")
    capsys.readouterr()
    train_here(data, **keys, resume_from_checkpoint="auto")
    log = capsys.readouterr().err
    assert "skipping checkpoint-2" in log and "starting from the beginning" in log
    assert_equal_weights(tmp_path / "out/final", tmp_path / "whole/final")
    assert_equal_weights(half_written, tmp_path / "whole/checkpoint-2")
    assert not (half_written / "model-00001-of-00002.safetensors").exists()
    assert (tmp_path / "out/incomplete-checkpoint-2/model-00001-of-00002.safetensors").exists()


def test_a_run_killed_saving_results_trains_no_further(train_here, tmp_path, monkeypatch):
    """HF trains one more step than `max_steps` where a run resumes from its last one within an epoch."""
    data = colour_pairs(tmp_path / "data", 8)
    keys = {"max_steps": 3, "save_steps": 1, "lr_scheduler_type": "constant"}
    train_here(data, "whole", **keys)
    train_here(data, **keys)
    (tmp_path / "out/final/COMPLETE.json").unlink()
    result = train_here(data, **keys, resume_from_checkpoint="auto")
    assert_equal_weights(tmp_path / "whole/final", result.model_dir)
    assert (tmp_path / "out/incomplete-final").exists()
    assert logged(tmp_path / "out/checkpoint-3", "loss") == logged(tmp_path / "whole/checkpoint-3", "loss")


def test_a_resumed_run_takes_another_rate_and_schedule(two_checkpoints, train_here, capsys):
    out, data = two_checkpoints
    capsys.readouterr()
    keys = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "max_steps": 6, "save_steps": 6}
    train_here(data, resume_from_checkpoint="auto", **keys)
    log = capsys.readouterr().err
    assert "learning_rate 0.001 -> 1e-05" in log and "lr_scheduler_type linear -> constant" in log
    assert logged(out / "checkpoint-6", "learning_rate")[-2:] == [1e-5, 1e-5]
    assert 0 < largest_difference(out / "checkpoint-4", out / "checkpoint-6") < 1e-4


def test_ctrl_c_names_the_checkpoint_to_continue_from(two_checkpoints, train_here, monkeypatch):
    out, data = two_checkpoints

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("vlmrm.training.trainer.ComparisonTrainer.training_step", interrupt)
    with pytest.raises(Interrupted, match=rf"after step 4: continue from {out}/checkpoint-4 with --resume") as stopped:
        train_here(data, max_steps=6, resume_from_checkpoint="auto")
    assert stopped.value.exit_code == 130


def test_a_resumed_step_may_read_other_batch_sizes(two_checkpoints, train_here, tmp_path, capsys):
    out, data = two_checkpoints
    smaller = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "resume_from_checkpoint": "auto"}
    train_here(data, max_steps=6, save_steps=6, **smaller)
    assert "per_device_train_batch_size 2 -> 1" in capsys.readouterr().err
    assert logged(out / "checkpoint-6", "epoch")[-1] == 1.5

    # With batches of another size it would leave other rows out.
    keys = {"save_steps": 2, "dataloader_drop_last": True}
    train_here(data, "dropping", max_steps=2, **keys)
    with pytest.raises(ConfigError, match=r"rows_per_batch \(.*\) was 2 in .* and is now 1"):
        train_here(data, "dropping", max_steps=4, **keys, **smaller)


def test_an_adapter_is_not_resumed_on_another_base(train_here, tiny_checkpoint, tmp_path):
    data = colour_pairs(tmp_path / "data", 8)
    base = Path(shutil.copytree(tiny_checkpoint, tmp_path / "base"))
    keys = {"model": base, "use_peft": True, "save_steps": 2}
    train_here(data, max_steps=2, **keys)
    shutil.copy(make_tiny(tmp_path / "other", seed=1) / "model.safetensors", base)
    with pytest.raises(
        CheckpointError, match=r"has other weights than it had \(.*base\): give the base that .*checkpoint-2"
    ):
        train_here(data, max_steps=4, resume_from_checkpoint="auto", **keys)
    shutil.copy(tiny_checkpoint / "model.safetensors", base)
    train_here(data, max_steps=4, resume_from_checkpoint="auto", **keys)


def test_a_run_is_resumed_on_moved_data(two_checkpoints, train_here, tmp_path, tiny_checkpoint, capsys):
    _, data = two_checkpoints
    moved = shutil.copytree(data.parent, tmp_path / "elsewhere") / data.name
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    capsys.readouterr()
    train_here(moved, max_steps=6, save_steps=3, model=model, resume_from_checkpoint="auto")
    log = capsys.readouterr().err
    assert "save_steps 2 -> 3" in log and "max_steps 4 -> 6" in log and f"-> {model}" in log
    assert "learning_rate 0.001 ->" not in log


def test_a_new_run_from_a_checkpoint_changes_rate(two_checkpoints, train_here, tmp_path):
    """The refusal advises it."""
    out, data = two_checkpoints
    train_here(data, "next", model=out / "checkpoint-4", learning_rate=1e-7, max_steps=1, save_steps=1)
    assert logged(tmp_path / "next/checkpoint-1", "learning_rate") == [1e-7]
    assert 0 < largest_difference(out / "checkpoint-4", tmp_path / "next/final") < 1e-5


def test_a_rewritten_checkpoint_counts_only_when_whole(two_checkpoints, train_here, monkeypatch):
    """A run taken up at an earlier step writes later checkpoints anew, and may die while it does."""
    out, data = two_checkpoints
    shutil.rmtree(out / "final")

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("vlmrm.training.folder.write_complete", die)
    with pytest.raises(Interrupted):
        train_here(data, max_steps=4, save_steps=2, resume_from_checkpoint=out / "checkpoint-2")
    assert (out / "checkpoint-4/model.safetensors").exists()
    assert not (out / "checkpoint-4/COMPLETE.json").exists()


def test_older_checkpoints_go_once_the_new_is_whole(train_here, tmp_path, monkeypatch):
    data = colour_pairs(tmp_path / "data", 8)
    others_then = {}

    def look(folder, **kwargs):
        others_then[folder.name] = {path.name for path in folder.parent.glob("checkpoint-*")} - {folder.name}
        write_complete(folder, **kwargs)

    monkeypatch.setattr("vlmrm.training.folder.write_complete", look)
    train_here(data, max_steps=6, save_steps=2, save_total_limit=1)
    assert others_then["checkpoint-4"] == {"checkpoint-2"}
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-6"}


def test_a_run_outlives_the_checkpoint_it_resumed(train_here, tmp_path):
    data, keys = colour_pairs(tmp_path / "data", 8), {"save_steps": 2, "save_total_limit": 1}
    train_here(data, max_steps=2, **keys)
    result = train_here(data, max_steps=4, resume_from_checkpoint="auto", **keys)
    assert not (tmp_path / "out/checkpoint-2").exists() and (result.model_dir / "COMPLETE.json").exists()


def test_nothing_to_resume_starts_afresh_and_says_so(train_here, tmp_path, capsys):
    train_here(colour_pairs(tmp_path / "data", 4), max_steps=1, resume_from_checkpoint="auto")
    assert "starting from the beginning" in capsys.readouterr().err

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
    words,
)
from vlmrm.errors import CheckpointError, ConfigError, Interrupted
from vlmrm.modeling import make_tiny
from vlmrm.training.arguments import RewardTrainingArguments

KILLED = Path(__file__).with_name("killed_training.py")
LONG = {"max_steps": 14, "save_steps": 4, "use_irrelevant_queries": True}
# With an epoch of five steps: within the second, at its end, and in the third.
KINDS = {
    "full": (6, {}),
    "lora": (10, {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1}),  # dropout: the random state is restored too
    "streamed": (12, {"streaming": True, "shuffle_buffer": 8}),
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


def test_sigterm_saves_the_next_step_and_says_so(tmp_path, tiny_checkpoint, train_here):
    data = colour_pairs(tmp_path / "data", 10)
    constant = {"lr_scheduler_type": "constant", "save_steps": 4000}  # else the rate would depend on max_steps
    arguments = short_training(tiny_checkpoint, data, tmp_path / "out", max_steps=4000, **constant)
    process = start(["train_rm.py"], *arguments, cwd=tmp_path)
    terminate_after(3, process)
    output = finish(process, 143)
    [saved] = (tmp_path / "out").glob("checkpoint-*")
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"error: stopped by SIGTERM after saving {saved}:")
    assert "--resume_from_checkpoint auto" in last and "Traceback" not in output
    assert not (tmp_path / "out/final").exists()

    step = int(saved.name.split("-")[1])
    train_here(data, max_steps=step + 3, resume_from_checkpoint="auto", **constant)
    train_here(data, "whole", max_steps=step + 3, **constant)
    assert_equal_weights(tmp_path / "out/final", tmp_path / "whole/final")


def test_a_second_training_in_a_folder_is_refused_until_the_first_is_dead(
    tmp_path, tiny_checkpoint, train_here, monkeypatch
):
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


def test_sigterm_to_torchrun_stops_every_rank_at_the_same_step(tmp_path, tiny_checkpoint):
    data = colour_pairs(tmp_path / "data", 12)
    constant = {"lr_scheduler_type": "constant", "save_steps": 4000}
    arguments = short_training(tiny_checkpoint, data, tmp_path / "out", max_steps=4000, **constant)
    process = start(["train_rm.py"], *arguments, cwd=tmp_path, processes=2)
    terminate_after(3, process)
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0
    [saved] = (tmp_path / "out").glob("checkpoint-*")
    complete = json.loads((saved / "COMPLETE.json").read_text())
    assert complete["world_size"] == 2
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(complete["files"])
    assert output.count(f"error: stopped by SIGTERM after saving {saved}") == 2

    step = int(saved.name.split("-")[1])
    constant["max_steps"] = step + 3
    resumed = words(resume_from_checkpoint="auto")
    train(*short_training(tiny_checkpoint, data, tmp_path / "out", **constant), *resumed, cwd=tmp_path, processes=2)
    train(*short_training(tiny_checkpoint, data, tmp_path / "whole", **constant), cwd=tmp_path, processes=2)
    assert_equal_weights(tmp_path / "out/final", tmp_path / "whole/final")


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
def test_a_broken_newest_checkpoint_is_named_and_passed_over(two_checkpoints, train_here, capsys, how):
    out, data = two_checkpoints
    shutil.copytree(out / "checkpoint-4", out.parent / "whole-4")
    damage(out / "checkpoint-4", how)
    shutil.rmtree(out / "final")
    capsys.readouterr()
    train_here(data, max_steps=4, save_steps=2, resume_from_checkpoint="auto")
    log = capsys.readouterr().err
    assert "skipping checkpoint-4" in log and f"Resuming from {out / 'checkpoint-2'}" in log
    assert_equal_weights(out / "checkpoint-4", out.parent / "whole-4")

    damage(out / "checkpoint-4", how)
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        train_here(data, max_steps=4, resume_from_checkpoint=out / "checkpoint-4")


def test_a_run_killed_in_its_first_save_begins_again(train_here, tmp_path, capsys, monkeypatch):
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


def test_a_run_killed_while_it_saves_its_result_saves_it_without_another_step(train_here, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_decay", 0.5),
        ("head", "mlp"),
        ("freeze_llm", True),
        ("use_peft", True),
        ("seed", 7),
        ("max_train_samples", 5),
    ],
)
def test_what_a_resumed_run_would_ignore_is_refused_by_name(two_checkpoints, train_here, key, value):
    """HF takes the optimizer from the checkpoint whatever is asked for, and its place in other data is none."""
    out, data = two_checkpoints
    with pytest.raises(ConfigError, match=rf"{key} was .* in {out / 'checkpoint-4'} and is now {value}.*from the"):
        train_here(data, max_steps=6, resume_from_checkpoint="auto", **{key: value})
    assert not (out / "checkpoint-6").exists()


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


SIZE, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"


@pytest.mark.parametrize("how", [SIZE, ACCUMULATED, "processes"])
def test_a_run_whose_steps_hold_another_number_of_rows_is_not_resumed(two_checkpoints, train_here, monkeypatch, how):
    """HF finds its place by counting steps: of another size they lead to another row."""
    _, data = two_checkpoints
    keys = {SIZE: {SIZE: 4}, ACCUMULATED: {ACCUMULATED: 2}}.get(how, {})
    if how == "processes":
        monkeypatch.setattr("vlmrm.training.main.CHECKS", ())
        monkeypatch.setattr(RewardTrainingArguments, "world_size", property(lambda args: 2))
    with pytest.raises(ConfigError, match=r"rows_per_step \(.*\) was 2 in .* and is now 4"):
        train_here(data, max_steps=6, resume_from_checkpoint="auto", **keys)


def test_the_rows_of_a_step_may_be_read_in_other_batches(two_checkpoints, train_here, tmp_path, capsys):
    out, data = two_checkpoints
    capsys.readouterr()
    train_here(data, max_steps=6, save_steps=6, resume_from_checkpoint="auto", **{SIZE: 1, ACCUMULATED: 2})
    assert f"{SIZE} 2 -> 1" in capsys.readouterr().err
    assert logged(out / "checkpoint-6", "epoch")[-1] == 1.5

    # With batches of another size it would leave other rows out.
    keys = {"save_steps": 2, "dataloader_drop_last": True}
    train_here(data, "dropping", max_steps=2, **keys)
    with pytest.raises(ConfigError, match=r"rows_per_batch \(.*\) was 2 in .* and is now 1"):
        train_here(data, "dropping", max_steps=4, resume_from_checkpoint="auto", **keys, **{SIZE: 1, ACCUMULATED: 2})


def test_an_adapter_is_not_resumed_on_another_base_of_equal_shape(train_here, tiny_checkpoint, tmp_path):
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


def test_checkpoints_that_were_whole_and_are_not_are_not_written_over(two_checkpoints, train_here):
    out, data = two_checkpoints
    shutil.rmtree(out / "final")
    for name in ("checkpoint-2", "checkpoint-4"):
        damage(out / name, "truncated")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=r"checkpoint-4 was complete and no longer verifies \(.*1000 bytes.*\): "
    ):
        train_here(data, max_steps=4, resume_from_checkpoint="auto")
    left = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert left == before


def test_a_run_is_not_resumed_on_other_data_but_on_the_same_elsewhere(
    two_checkpoints, train_here, tmp_path, tiny_checkpoint, capsys
):
    _, data = two_checkpoints
    moved = shutil.copytree(data.parent, tmp_path / "elsewhere") / data.name
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    capsys.readouterr()
    train_here(moved, max_steps=6, save_steps=3, model=model, resume_from_checkpoint="auto")
    log = capsys.readouterr().err
    assert "save_steps 2 -> 3" in log and "max_steps 4 -> 6" in log and f"-> {model}" in log
    assert "learning_rate 0.001 ->" not in log

    colour_pairs(data.parent, 9)
    with pytest.raises(ConfigError, match="dataset_path is not the one"):
        train_here(data, max_steps=8, resume_from_checkpoint="auto")


def test_weights_without_an_optimizer_are_no_state_to_resume_from(two_checkpoints, train_here):
    """HF would begin with a fresh optimizer, and say nothing."""
    out, data = two_checkpoints
    with pytest.raises(CheckpointError, match="no optimizer state"):
        train_here(data, max_steps=6, resume_from_checkpoint=out / "final")


def test_a_folder_in_use_is_not_written_over(two_checkpoints, train_here):
    out, data = two_checkpoints
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"already holds checkpoint-4.*--resume_from_checkpoint auto"):
        train_here(data)
    for folder in out.glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="already holds final"):
        train_here(data)
    left = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert left and left.items() <= before.items()


def test_a_checkpoint_that_is_written_again_counts_only_when_whole(two_checkpoints, train_here, monkeypatch):
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


def test_older_checkpoints_go_only_when_the_new_one_is_whole(train_here, tmp_path, monkeypatch):
    data = colour_pairs(tmp_path / "data", 8)
    from vlmrm.modeling import write_complete

    others_then = {}

    def look(folder, **kwargs):
        others_then[folder.name] = {path.name for path in folder.parent.glob("checkpoint-*")} - {folder.name}
        write_complete(folder, **kwargs)

    monkeypatch.setattr("vlmrm.training.folder.write_complete", look)
    train_here(data, max_steps=6, save_steps=2, save_total_limit=1)
    assert others_then["checkpoint-4"] == {"checkpoint-2"}
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-6"}

"""`vlmrm plan`: its figures agree with the training, and it says what the training would refuse."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.runs import colour_pairs, short_training
from vlmrm import cli
from vlmrm.training import plan as planning
from vlmrm.training.arguments import RunArguments
from vlmrm.training.folder import output_lock
from vlmrm.training.plan import count_steps, plan_training


@pytest.fixture
def planned(tmp_path, tiny_checkpoint, monkeypatch):
    """`planned(**keys)` is the plan of a short training in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def plan(count: int = 10, **keys):
        data = tmp_path / "data/pairs.jsonl"
        data = data if data.exists() else colour_pairs(tmp_path / "data", count)
        return plan_training(short_training(tiny_checkpoint, data, tmp_path / "out", **keys))

    return plan


@pytest.fixture
def without_trial(monkeypatch):
    monkeypatch.setattr(planning, "_measure", lambda *args: None)


def test_a_plan_measures_training_and_leaves_nothing_behind(planned, tmp_path):
    keys = {"eval_dataset_path": colour_pairs(tmp_path / "held_out", 5), "eval_strategy": "steps", "eval_steps": 2}
    before = set(tmp_path.rglob("*")) | {tmp_path / "data"}
    plan = planned(**keys, save_steps=2)
    assert not plan.errors
    assert {path for path in set(tmp_path.rglob("*")) - before if "data" not in path.parts} == set()
    assert (plan.steps, plan.epochs, plan.rows_per_step) == (5, 1.0, 2)
    assert plan.memory is not None
    assert plan.memory.optimizer == pytest.approx(2 * plan.memory.weights, rel=0.01)
    assert plan.memory.gradients == 4 * (plan.trained_parameters or 0)
    assert plan.step_seconds is not None and plan.step_seconds > 0
    assert plan.disk is not None and plan.disk.checkpoint >= 3 * plan.memory.weights
    assert plan.held_out_prompts == 5 and any("too few to tell" in it for it in plan.remarks)


def test_a_plan_names_everything_that_stops_training(planned, tmp_path, without_trial):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    plan = planned(lora_r=4, max_seq_length=47)
    refusals = " ".join(plan.errors)
    assert "lora_r does nothing without use_peft" in refusals and "notes.txt" in refusals
    assert "of the 10 rows of dataset_path would be left out" in refusals
    assert plan.train is not None and plan.train.reasons["over max_seq_length"] == plan.train.dropped > 0


def test_a_plan_says_what_differs_from_the_checkpoint(planned, train_here, tmp_path, without_trial):
    train_here(colour_pairs(tmp_path / "data", 10), max_steps=2, save_steps=2)
    plan = planned(max_steps=6, learning_rate=1e-4, resume_from_checkpoint="auto")
    assert plan.resumed == str(tmp_path / "out/checkpoint-2") and not plan.errors
    assert "learning_rate 0.001 -> 0.0001" in plan.changes
    refused = planned(max_steps=6, seed=7, resume_from_checkpoint="auto")
    assert any("seed was 42" in error for error in refused.errors)


def test_a_plan_beside_a_running_training_is_refused(planned, tmp_path, without_trial):
    half_written = tmp_path / "out/checkpoint-2"
    half_written.mkdir(parents=True)
    with output_lock(SimpleNamespace(output_dir=tmp_path / "out", process_index=0)):  # ty: ignore[invalid-argument-type]
        plan = planned(resume_from_checkpoint="auto")
        [refusal] = plan.errors
        assert "another training is writing into" in refusal and not plan.set_aside
    plan = planned(resume_from_checkpoint="auto")
    assert plan.restart == "begins anew: no checkpoint was ever complete" and half_written.exists()
    assert plan.set_aside == {"checkpoint-2": "saving it was interrupted"} and not plan.errors


def test_a_plan_knows_the_disk_of_checkpoints(planned, train_here, tmp_path, without_trial):
    disk = planned(save_steps=2).disk
    train_here(tmp_path / "data/pairs.jsonl", max_steps=2, save_steps=2)
    written = sum(file.stat().st_size for file in (tmp_path / "out/checkpoint-2").rglob("*"))
    assert disk is not None and disk.checkpoint == pytest.approx(written, rel=0.05)
    assert 3 * disk.checkpoint < disk.kept < 4 * disk.checkpoint  # and the last model, without its optimizer


@pytest.mark.parametrize(
    ("keys", "rows", "ranks", "steps"),
    [
        ({"max_steps": -1, "num_train_epochs": 2}, 10, 1, 10),
        ({"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 2}, 10, 1, 3),
        ({"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True}, 11, 1, 5),
        ({"max_steps": -1, "num_train_epochs": 1}, 11, 2, 3),
        ({"max_steps": 7}, 10, 1, 7),
    ],
)
def test_steps_are_counted_as_the_trainer_counts_them(tiny_checkpoint, tmp_path, keys, rows, ranks, steps):
    run = RunArguments.parse(short_training(tiny_checkpoint, "x", tmp_path / "out", **keys), "test")
    assert count_steps(run, rows, ranks)[0] == steps


def test_the_plan_status_tells_whether_training_would_start(tmp_path, tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = short_training(tiny_checkpoint, colour_pairs(tmp_path / "data", 4), tmp_path / "out")

    def run(*extra: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.app(["plan", *line, *extra], exit_on_error=False)
        return int(stopped.value.code or 0), capsys.readouterr().out

    status, text = run()
    assert status == 0 and "It would start." in text and len(text.splitlines()) < 30
    status, text = run("--json", "--max_seq_length", "20")
    assert status == 2 and "none of the 4 rows" in json.loads(text)["errors"][0]

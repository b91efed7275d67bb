"""What a run shows while it trains."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from runs import colour_pairs

from vlmrm import logs
from vlmrm.errors import ConfigError, Interrupted
from vlmrm.logs import Pace, progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is set."""
    moment = SimpleNamespace(now=0.0)
    monkeypatch.setattr(logs.time, "monotonic", lambda: moment.now)
    return moment


def test_a_pace_is_step_share_and_time_left(clock):
    pace = Pace(700, since=100)
    assert pace.position(100) == "100/700 (14 %)"
    clock.now = 60.0
    assert pace.position(200) == "200/700 (28 %, 5 min left)"
    assert pace.position(640) == "640/700 (91 %, 7 s left)"
    clock.now = 6000.0
    assert pace.position(400) == "400/700 (57 %, 1 h 40 min left)".replace("1 h 40 min", "100 min")
    assert pace.position(250) == "250/700 (35 %, 5 h 0 min left)"
    assert pace.position(700) == "700/700 (100 %)"
    assert Pace(None).position(12000) == "12,000"


def test_a_long_pass_outside_a_terminal_has_a_line_every_half_minute(clock, monkeypatch, capsys):
    monkeypatch.setattr(logs.logger, "handlers", [])

    def rows():
        for row in range(100):
            clock.now += 1.0
            yield row

    assert list(progress(rows(), "reading rows", 100)) == list(range(100))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading rows: 29/100 (29 %, 73 s left)" and len(lines) == 3
    assert list(progress(rows(), "reading rows", 100, show=False)) == list(range(100))
    assert not capsys.readouterr().err


def test_every_line_has_step_and_time_left_and_is_in_the_log_file_and_curves_are_drawn(train_here, tmp_path, capfd):
    data = colour_pairs(tmp_path / "data", 8)
    train_here(data, eval_dataset_path=data, eval_strategy="steps", eval_steps=2, max_steps=4, disable_tqdm=False)
    [log] = Path("logs").glob("train_*.log")
    terminal = capfd.readouterr().err
    for text in (log.read_text(), terminal):
        steps = re.findall(r"step (\d)/4 \((\d+) %(, \d+ s left)?\): (loss|eval_accuracy|train_runtime) ", text)
        assert [(step, share, name) for step, share, _, name in steps] == [
            *(("1", "25", "loss"), ("2", "50", "loss"), ("2", "50", "eval_accuracy"), ("3", "75", "loss")),
            *(("4", "100", "loss"), ("4", "100", "eval_accuracy"), ("4", "100", "train_runtime")),
        ]
        assert [bool(left) for *_, left, _ in steps] == [True, True, True, True, False, False, False]
    of_figures = [line for line in terminal.splitlines() if line.startswith("step ")]
    assert max(map(len, of_figures)) < 100 and "margin" not in "".join(of_figures), "one line of a terminal"
    assert "margin" in log.read_text() and "tokens_per_second" in log.read_text()
    assert "%|" not in terminal.replace("Loading weights", "").partition("Training")[2].partition("shards")[0]
    with Image.open("out/curves.png") as picture:
        assert picture.width > 500


@pytest.mark.parametrize("save_steps", [2, 100])
def test_ctrl_c_names_the_newest_checkpoint_and_how_to_go_on(save_steps, train_here, tmp_path, monkeypatch):
    data = colour_pairs(tmp_path / "data", 8)

    def press(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("vlmrm.training.trainer.BetweenSteps.on_step_begin", press)
    with pytest.raises(Interrupted) as stopped:
        train_here(data, max_steps=4, save_steps=save_steps)
    assert isinstance(stopped.value, KeyboardInterrupt) and stopped.value.exit_code == 130
    monkeypatch.undo()
    if save_steps == 100:
        assert str(stopped.value).startswith("interrupted after step 3, and no checkpoint was saved yet: start again")
    else:
        continued = f"continue from {tmp_path / 'out/checkpoint-2'} with --resume_from_checkpoint auto."
        assert str(stopped.value) == f"interrupted after step 3: {continued}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("trackio", r"report_to: trackio needs trackio: pip install .*\[trackio\]"),
        ("tensorboad", r"did you mean tensorboard\?"),
    ],
)
def test_a_reporter_that_is_missing_is_one_sentence(name, sentence, train_here, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrm.training.checks.get_available_reporting_integrations", list)
    data = colour_pairs(tmp_path / "data", 2)
    with pytest.raises(ConfigError, match=sentence):
        train_here(data, report_to=name)

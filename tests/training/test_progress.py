"""What a run shows while it trains."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.runs import colour_pairs
from vlmrm import logs
from vlmrm.errors import ConfigError
from vlmrm.logs import progress


def test_a_long_pass_logs_every_half_minute(monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(logs.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(logs.logger, "handlers", [])

    def rows():
        for row in range(100):
            clock.now += 1.0
            yield row

    assert list(progress(rows(), "reading rows", 100)) == list(range(100))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading rows: 29/100 (29 %, 73 s left)" and len(lines) == 3


def test_progress_reaches_the_log_and_curves_are_drawn(train_here, tmp_path, capfd):
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
    assert "margin" in log.read_text() and "tokens_per_second" in log.read_text()
    with Image.open("out/curves.png") as picture:
        assert picture.width > 500


def test_a_reporter_that_is_missing_is_named(train_here, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrm.training.checks.get_available_reporting_integrations", list)
    data = colour_pairs(tmp_path / "data", 2)
    with pytest.raises(ConfigError, match=r"report_to: trackio needs trackio: pip install .*\[trackio\]"):
        train_here(data, report_to="trackio")

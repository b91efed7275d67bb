"""`vlmrm frames label`: trajectories with a judge's labels in place of their own."""

from __future__ import annotations

import numpy as np
import pytest
from robot_worlds.squares import write_squares

from vlmrm import cli
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm_robots.trajectories.trajectory import open_folder, trajectory_paths


class Brightest:
    """A judge of single pictures: how bright the brightest pixel is; it counts what it is asked."""

    def __init__(self):
        self.asked = []

    def score_prefixes(self, task, frames):
        [frame] = frames
        self.asked.append(task)
        return [float(np.asarray(frame).max())]


@pytest.fixture
def judge(monkeypatch):
    judge = Brightest()
    monkeypatch.setattr("vlmrm_robots.trajectories.reward_models.open_prefix_scorer", lambda model: judge)
    return judge


def labelled(root, *words, above=200.0, task="Show the square.", positive="new/p"):
    folders = [str(root / "positive"), str(root / "negative")]
    words = ["--positive-dir", str(root / positive), "--negative-dir", str(root / "new" / "n"), *words]
    task_words = ["--task", task] if task else []
    command = ["frames", "label", *folders, "--model", "judge.yaml", "--above", str(above), *task_words, *words]
    cli.app(command, result_action="return_value", exit_on_error=False)


def test_labels_come_from_the_judge_by_frame(judge, tmp_path, capsys):
    write_squares(tmp_path, positive=3, negative=2)
    labelled(tmp_path)
    said = capsys.readouterr().out
    assert "3 positive and 2 negative trajectories" in said and "100.0% of 50 frames keep their label" in said
    for old, new in (("positive", "p"), ("negative", "n")):
        before, after = open_folder(tmp_path / old), open_folder(tmp_path / "new" / new)
        assert [file.labels.tolist() for file in after] == [file.labels.tolist() for file in before]
        shown = zip(after, before, strict=True)
        assert all((a.frames("base_camera") == b.frames("base_camera")).all() for a, b in shown)
        assert after[0].metadata["declared_success"] == "judge.yaml > 200 for 'Show the square.'"
    assert set(judge.asked) == {"Show the square."} and len(judge.asked) == 50


def test_episodes_change_sides_and_it_is_counted(judge, tmp_path, capsys):
    write_squares(tmp_path, positive=3, negative=2)
    labelled(tmp_path, above=300.0)  # which no pixel is
    assert "0 positive and 5 negative" in (said := capsys.readouterr().out) and "3 episodes change sides" in said
    assert "70.0% of 50 frames keep their label" in said and not trajectory_paths(tmp_path / "new" / "p")


def test_an_interrupted_labelling_resumes_but_other_tasks_restart(judge, tmp_path, capsys):
    write_squares(tmp_path, positive=3, negative=2)
    labelled(tmp_path)
    next(iter(trajectory_paths(tmp_path / "new" / "n"))).unlink()
    judge.asked.clear()
    labelled(tmp_path)
    assert len(judge.asked) == 10 and "4 were there before" in capsys.readouterr().out
    labelled(tmp_path, task="Hide the square.")
    assert len(judge.asked) == 60


def test_what_cannot_be_labelled_is_named(judge, tmp_path):
    write_squares(tmp_path, positive=1, negative=1)
    with pytest.raises(ConfigError, match="positive has the episodes themselves"):
        labelled(tmp_path, positive="positive")
    with pytest.raises(DataError, match="does not say its task: name it with --task"):
        labelled(tmp_path, task=None)
    with pytest.raises(DataError, match="has no images 'wrist'"):
        labelled(tmp_path, "--image-key", "wrist")

    def silent(task, frames):
        raise RowError("it answers nothing")

    judge.score_prefixes = silent
    with pytest.raises(DataError, match=r"frame 0 of .* has no score: it answers nothing\."):
        labelled(tmp_path)

"""Scores after each frame of an episode, and the value-order correlation against scipy's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from robot_worlds.squares import small_classifier, small_config, write_squares
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from vlmrm import cli
from vlmrm.errors import ConfigError, RowError
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.trajectories.reward_models import Scored, open_prefix_scorer, score_episodes, summarise, value_order
from vlmrm_robots.trajectories.trajectory import Trajectory, open_folder, write_trajectory


@pytest.fixture
def files(tmp_path):
    root = write_squares(tmp_path, positive=3, negative=2)
    return open_folder(root / "positive") + open_folder(root / "negative")


def test_the_mean_matches_scipy_and_its_interval_covers(files):
    chance = np.random.default_rng(0)

    def episodes(count: int) -> list[Scored]:
        lengths = chance.integers(4, 12, count)
        return [Scored(files[0], range(n), np.arange(n) / 3 + chance.normal(size=n)) for n in lengths]

    def reference(scored) -> float:
        return np.mean([spearmanr(e.steps, e.scores).statistic for e in scored])

    truth = reference(episodes(4000))
    inside = 0
    for _ in range(200):
        sample = episodes(20)
        found = value_order([*sample, Scored(files[0], [0], [1.0])])  # of one frame: no order
        assert found.value == pytest.approx(reference(sample)) and found.n == 20
        inside += found.low <= truth <= found.high
    assert 0.9 <= inside / 200 <= 1.0
    assert value_order([Scored(files[0], range(5), range(5, 0, -1))] * 3).value == pytest.approx(-1)
    assert np.isnan(value_order([]).value)


class Planted:
    """A scorer that is a function of the frames shown so far."""

    def __init__(self, score):
        self.score_prefixes = lambda task, frames: [score(frames[: stop + 1]) for stop in range(len(frames))]


def test_scores_that_differ_by_rounding_alone_are_tied(files):
    alike = np.full(6, 5.2e-4) + 5e-10 * np.arange(6) / 5
    episode = Scored(files[0], range(6), np.linspace(1e-4, 6e-4, 6), repeated=alike, shuffled=1e3 * alike)
    assert value_order([episode] * 3).value == pytest.approx(1)
    assert value_order([episode] * 3, "repeated").value == 0
    apart = Scored(files[0], range(6), alike + 1e-8 * np.arange(6))
    assert value_order([apart] * 3).value == pytest.approx(1)


def brightness(frame) -> float:
    return float(np.asarray(frame).mean())


PLANTED = {
    "counts frames": len,
    "sees the last frame": lambda frames: brightness(frames[-1]),
    "counts and sees": lambda frames: brightness(frames[-1]) + 200.0 * len(frames),
    "sees nothing": lambda frames: 0.5,
}


@pytest.fixture
def brightening(tmp_path):
    """Ten episodes that grow brighter up to their success, and ten that stay dark; all of twelve frames."""
    chance = np.random.default_rng(0)
    for number in range(20):
        level = np.linspace(0, 200, 12) if number % 2 else np.full(12, 20.0)
        noise = chance.integers(0, 40, (12, 3, 8, 8))
        labels = (np.arange(12) == 11).astype(np.float32) * (number % 2)
        images = {"front": (noise + level[:, None, None, None]).astype(np.uint8)}
        write_trajectory(tmp_path / "bright", Trajectory(images, labels, {"task": "Light it."}), f"{number:02d}")
    return open_folder(tmp_path / "bright")


@pytest.mark.parametrize("kind", PLANTED)
def test_a_frame_counting_scorer_is_told_apart(brightening, kind):
    scored = score_episodes(Planted(PLANTED[kind]), brightening, task=None, frames=8, image_key=None)
    successes = [episode for episode in scored if episode.success]
    said = summarise(scored)
    assert len(successes) == 10 and {len(episode.scores) for episode in scored} == {8}
    if kind == "sees the last frame":
        assert value_order(successes).value > 0.98 and value_order(successes, less="repeated").low > 0.5
        assert value_order(successes, less="shuffled").low > 0.3 and "warning" not in said
        assert "AUC of success by the last score, of 10 successes and 10 failures: 1.00" in said
    elif kind == "sees nothing":
        assert value_order(successes).value == 0 and said.count("warning") == 2 and "0.50" in said
    else:  # whatever it is shown, each frame more scores higher
        assert value_order(successes).value == value_order(successes, "repeated").value == pytest.approx(1)
        assert value_order(successes, less="repeated").value == pytest.approx(0, abs=1e-9)
        assert said.count("warning: it is not shown to be more than that of their first frame repeated") == 1


def test_first_frames_telling_the_outcome_are_warned_of(brightening):
    outcomes = {str(file.path): bool(file.successes.any()) for file in brightening}
    order = iter([outcome for outcome in outcomes.values() for _ in range(3)])  # each episode is scored thrice

    class Knows:
        def score_prefixes(self, task, frames):
            known = next(order)
            return [known + 0.01 * brightness(frame) for frame in frames]

    said = summarise(score_episodes(Knows(), brightening, task=None, frames=4, image_key=None))
    assert "warning: their first frame, or the number of frames, tells successes from failures already" in said


def test_probabilities_of_success_are_of_one_logistic_curve(brightening, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "vlmrm_robots.trajectories.reward_models.open_prefix_scorer", lambda model: Planted(PLANTED["counts and sees"])
    )
    words = ["frames", "progress", tmp_path / "bright", "--model", "any", "--output", tmp_path / "out.jsonl"]
    cli.app([*map(str, words)], exit_on_error=False, result_action="return_value")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    last = np.array([line["success_probabilities"][-1] for line in lines])
    good = np.array([line["success"] for line in lines])
    assert good.sum() == 10 and roc_auc_score(good, last) == 1 and ((last > 0.5) == good).all()
    early = np.array([line["success_probabilities"][0] for line in lines])
    assert (early < 0.5).all()  # of the same curve, after one frame
    said = capsys.readouterr().out
    assert "probability of success: σ(" in said
    assert set(lines[0]) >= {"first_frame_repeated", "frames_shuffled", "steps", "scores"}


def test_any_reward_scores_prefixes(tmp_path):
    """The frame classifier: its score of a prefix is its probability for the last frame."""
    files = open_folder(write_squares(tmp_path, positive=2, negative=0) / "positive")
    model = small_classifier()
    save_classifier(tmp_path / "model.safetensors", model, small_config())
    settings = {
        "name": "done",
        "reward_model": "frame_success",
        "checkpoint_path": str(tmp_path / "model.safetensors"),
    }
    settings |= {"reward_type": "continuous", "dtype": "float32", "device": "cpu"}
    (tmp_path / "done.yaml").write_text(json.dumps({"rewards": [settings]}))
    scorer = open_prefix_scorer(str(tmp_path / "done.yaml"))
    scored = score_episodes(scorer, files, task="Show a square.", frames=4, image_key=None)
    for episode in scored:
        frames = torch.stack([torch.from_numpy(episode.file.frame("base_camera", step)) for step in episode.steps])
        with torch.inference_mode():
            expected = torch.sigmoid(model({"base_camera": frames / 255}))
        assert episode.scores == pytest.approx(expected.tolist(), abs=1e-5)
        assert np.ptp(episode.repeated) < 1e-6 < np.ptp(episode.scores)
    with pytest.raises(RowError, match=r"reward done has none for the first 1 frames: .*is \[3, 8, 8\]"):
        scorer.score_prefixes("", [Image.new("RGB", (8, 8))])
    two = [settings, {**settings, "name": "again"}]
    (tmp_path / "two.yaml").write_text(json.dumps({"rewards": two}))
    with pytest.raises(ConfigError, match="has 2 rewards, of which one can score episodes"):
        open_prefix_scorer(str(tmp_path / "two.yaml"))
    (tmp_path / "group.yaml").write_text(
        json.dumps(
            {"rewards": [{"name": "ranked", "reward_model": "remote_groupwise", "server_url": "http://there:1"}]}
        )
    )
    with pytest.raises(ConfigError, match="reward ranked compares answers"):
        open_prefix_scorer(str(tmp_path / "group.yaml"))


def test_the_command_writes_episode_scores_up_to_success(files, tmp_path, tiny_reward_model, capsys):
    output = tmp_path / "progress.jsonl"
    words = ["frames", "progress", tmp_path / "positive", tmp_path / "negative", "--model", tiny_reward_model]
    words += ["--output", output, "--task", "Show a square.", "--frames", "4"]
    cli.app([*map(str, words)], exit_on_error=False, result_action="return_value")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["success"] for line in lines] == [True] * 3 + [False] * 2
    assert lines[0]["steps"] == [0, 2, 3, 5] and lines[4]["steps"] == [0, 3, 6, 9]  # the sixth of ten is a success
    assert len(lines[0]["scores"]) == 4 and len(set(lines[0]["scores"])) == 4
    said = capsys.readouterr().out
    assert "value-order correlation of 3 successes" in said and "of 2 failures" in said
    assert "AUC of success by the last score, of 3 successes and 2 failures" in said
    assert len(lines[0]["first_frame_repeated"]) == len(lines[0]["frames_shuffled"]) == 4

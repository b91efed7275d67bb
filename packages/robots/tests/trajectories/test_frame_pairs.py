"""Rows made of episodes: which frames each kind compares or values, and a training on them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from vlmrm import cli, load_scorer
from vlmrm.errors import ConfigError, DataError
from vlmrm.scoring.protocol import prefixes_of
from vlmrm_robots.trajectories.reward_models import Scored, value_order
from vlmrm_robots.trajectories.rows import KINDS, write_pairs, write_values
from vlmrm_robots.trajectories.trajectory import Trajectory, open_folder, write_trajectory

SIDE, FRAMES = 56, 6
TASK = "Make it bright."


def episode(generator, success: bool, task: str | None = TASK, level: float = 0.0) -> Trajectory:
    """Noise that grows brighter to the fifth frame, the first success; or stays as dark as it was."""
    brightness = np.clip(np.arange(FRAMES) / (FRAMES - 2), 0, 1) if success else np.full(FRAMES, level)
    noise = generator.integers(0, 30, (FRAMES, 3, SIDE, SIDE))
    images = (noise + 220 * brightness[:, None, None, None]).astype(np.uint8)
    metadata = {"environment": "Light"} | ({} if task is None else {"task": task})
    return Trajectory({"front": images}, (brightness >= 1).astype(np.float32), metadata)


def write_episodes(root, count: int, seed: int = 0, **options):
    generator = np.random.default_rng(seed)
    for number in range(count):
        write_trajectory(root, episode(generator, True, **options), f"won{number}")
        write_trajectory(root, episode(generator, False, **options), f"lost{number}")
    return open_folder(root)


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(row: dict, side: str) -> list[int]:
    return [int(step) for step in row[f"{side}_steps"].split()]


def test_each_kind_compares_the_frames_that_it_says(tmp_path):
    files = write_episodes(tmp_path / "light", 3) + write_episodes(tmp_path / "dark", 1, seed=1, task="Make it dark.")
    counts = write_pairs(files, tmp_path / "pairs.jsonl", kinds=KINDS)
    assert counts == {"outcome": 4, "truncation": 4, "rewind": 4, "instruction": 4}
    rows = rows_of(tmp_path / "pairs.jsonl")
    assert {kind: sum(row["category"] == kind for row in rows) for kind in KINDS} == counts
    for row in rows:
        better, worse = steps_of(row, "chosen"), steps_of(row, "rejected")
        assert better[-1] == 4  # the first success, and not beyond
        assert "won" in row["chosen_episode"]
        if row["category"] == "outcome":
            assert "lost" in row["rejected_episode"] and worse == [0, 1, 2, 4, 5]
            assert row["rejected_episode"].split("/")[-2] == row["chosen_episode"].split("/")[-2]  # of one task
        else:
            assert row["rejected_episode"] == row["chosen_episode"]
        if row["category"] == "truncation":
            assert worse == [*range(len(worse))] and len(worse) <= 3
        else:
            assert better == [0, 1, 2, 3, 4]
        if row["category"] == "rewind":
            peak = worse.index(max(worse))
            assert worse == [*sorted(worse[: peak + 1]), *sorted(worse[peak:], reverse=True)[1:]] and max(worse) < 4
        if row["category"] == "instruction":
            better, other = row["chosen"], row["rejected"]
            assert better[0]["content"] != other[0]["content"] and better[1] == other[1]


def test_a_frame_is_written_once_from_its_trajectory(tmp_path):
    [won, lost] = write_episodes(tmp_path / "data", 1)
    write_pairs([won, lost], tmp_path / "pairs.jsonl")
    pictures = sorted((tmp_path / "pairs_frames").iterdir())
    assert len(pictures) == 5 + FRAMES - 1  # the failure shows five of its six
    with Image.open(pictures[3]) as picture:
        assert (np.asarray(picture).transpose(2, 0, 1) == won.frame("front", 3)).all()


@pytest.mark.parametrize("frames", [3, 8])  # of clips that have as many, and of clips that have fewer
def test_the_number_of_frames_tells_nothing(tmp_path, frames):
    write_episodes(tmp_path / "light", 3, task="Make it bright.")
    files = open_folder(tmp_path / "light") + write_episodes(tmp_path / "dark", 2, seed=1, task="Make it dark.")
    write_pairs(files, tmp_path / "pairs.jsonl", kinds=KINDS, frames=frames)
    rows = rows_of(tmp_path / "pairs.jsonl")
    counts = {(len(steps_of(row, "chosen")), len(steps_of(row, "rejected"))) for row in rows}
    assert all(chosen == rejected <= frames for chosen, rejected in counts)
    assert max(counts) == (min(frames, 5),) * 2
    assert {steps_of(row, "chosen")[-1] for row in rows} == {4}
    for row in (row for row in rows if "chosen" in row):  # the columns say what is shown
        assert [len(row[side][-1]["content"]) for side in ("chosen", "rejected")] == [len(steps_of(row, "chosen"))] * 2


def test_what_there_is_no_pair_of_is_named(tmp_path):
    files = write_episodes(tmp_path / "data", 1, task=None)
    with pytest.raises(DataError, match="does not say its task: name it with --task"):
        write_pairs(files, tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="kind instruction, because all trajectories are of one task"):
        write_pairs(files, tmp_path / "a.jsonl", task=TASK, kinds=["instruction"])
    with pytest.raises(DataError, match="kind outcome, because no success and failure"):
        write_pairs(files[:1], tmp_path / "a.jsonl", task=TASK)
    with pytest.raises(DataError, match="no images wrist"):
        write_pairs(files, tmp_path / "a.jsonl", task=TASK, image_key="wrist")
    assert not (tmp_path / "a.jsonl").exists()
    write_pairs(files, tmp_path / "a.jsonl", task=TASK)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match="a_frames exists already"):
        write_pairs(files, tmp_path / "a.jsonl", task=TASK)


def test_the_ordinary_trainer_learns_which_episodes_are_better(tmp_path, tiny_reward_model, train_here, capsys):
    write_episodes(tmp_path / "data", 12)
    options = ["--output", str(tmp_path / "pairs.jsonl"), "--kinds", "outcome", "truncation", "--frames", "3"]
    cli.app(["frames", "pairs", str(tmp_path / "data"), *options], exit_on_error=False, result_action="return_value")
    assert "24 pairs" in capsys.readouterr().out
    train_here(tmp_path / "pairs.jsonl", max_steps=40, learning_rate=2e-3)
    scorer = load_scorer(tmp_path / "out" / "final")
    fresh = write_episodes(tmp_path / "fresh", 8, seed=9)
    scores = [scorer.score_prefixes(TASK, pictures_of(file, [0, 2, 4])) for file in fresh]
    won = np.array([s for s, file in zip(scores, fresh, strict=True) if file.successes.any()])
    lost = np.array([s for s, file in zip(scores, fresh, strict=True) if not file.successes.any()])
    assert (won[:, -1:] > lost[:, -1]).mean() > 0.9  # success against failure
    assert (won[:, -1] > won[:, 0]).mean() > 0.9  # later against earlier
    voc = value_order([Scored(f, [0, 2, 4], s) for f, s in zip(fresh, scores, strict=True) if f.successes.any()])
    assert voc.value > 0.9
    untrained = load_scorer(tiny_reward_model).score_prefixes(TASK, pictures_of(fresh[0], [0, 2, 4]))
    assert np.ptp(scores[0]) > 3 * np.ptp(untrained)


def test_values_are_the_way_to_success_and_back(tmp_path):
    files = write_episodes(tmp_path / "light", 1) + write_episodes(tmp_path / "dark", 1, seed=1, task="Make it dark.")

    counts = write_values(files, tmp_path / "values.jsonl", frames=4)

    assert counts == dict.fromkeys(["success", "failure", "truncation", "rewind", "instruction"], 2)
    rows = {row["category"]: row for row in rows_of(tmp_path / "values.jsonl")}
    assert rows["success"]["progress"] == [0, 0.25, 0.75, 1] and rows["success"]["success"] == [0, 0, 0, 1]
    assert set(rows["failure"]["progress"]) == {None} and set(rows["failure"]["success"]) == {0.0}
    assert set(rows["instruction"]["progress"] + rows["instruction"]["success"]) == {0.0}
    for kind in ("truncation", "rewind"):
        steps = [int(name[-8:-4]) for name in rows[kind]["frames"]]
        assert rows[kind]["progress"] == [step / 4 for step in steps] and max(steps) < 4


def test_the_ordinary_trainer_learns_progress_and_success(tmp_path, train_here):
    write_values(write_episodes(tmp_path / "data", 12), tmp_path / "values.jsonl", frames=3)
    outputs = ["done=progress", "success=correctness"]
    train_here(tmp_path / "values.jsonl", outputs=outputs, max_steps=60, learning_rate=2e-3)
    scorer = load_scorer(tmp_path / "out" / "final")
    frames = [pictures_of(file, [0, 2, 4]) for file in write_episodes(tmp_path / "fresh", 8, seed=9)]

    won, lost = (
        [[it["done"], it["success"]] for one in frames[side::2] for it in scorer.score_outputs(prefixes_of(TASK, one))]
        for side in (0, 1)
    )

    won, lost = np.reshape(won, (8, 3, 2)), np.reshape(lost, (8, 3, 2))
    assert np.abs(won[..., 0] - [0, 0.5, 1]).mean() < 0.15
    assert (won[:, -1, 1] > 0.5).mean() > 0.8 and (lost[..., 1] < 0.5).mean() > 0.9


def pictures_of(file, steps):
    return [Image.fromarray(file.frame("front", step).transpose(1, 2, 0)) for step in steps]

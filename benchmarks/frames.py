"""Success rewards from frames: how fast labelled frames are collected, trained on and scored.

`collect` plays Acrobot, draws and labels each state and writes the trajectories; `plain_seconds` is what drawing the
same number of frames at the simulator's own size and scaling them down takes alone. `train_compute_share` is the time
of a training's steps on batches that are in memory as the model takes them, over that of the training without its
evaluation and checkpoints. `write_flat` is the median time of files from a folder's 2,000th on over that of files from
another's 10th on, by turns, each stored as the collector does: held against a limit, looked for, written, noted.
`score_64` is a step of `FrameReward` with 64 environments that take no time, over the model's forward pass alone.
`prefix_scores` is a vision-language model (h512) that scores every prefix of an episode, in a forward for each over
the one forward of `LocalScorer.score_prefixes`, whose scores are compared first; rendering is in neither.
`progress_order` is the share of any two frames of new clips, rewinds among them, that a model of `frames values`
has in the right order; `above_controls` how much more that is than of a clock, which counts frames, and of the model
where each frame is the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, VectorEnv
from PIL import Image, ImageDraw

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from benchmarks.shapes import configuration, reward_checkpoint
from vlmrm.modeling import make_tiny
from vlmrm.scoring import load_scorer
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.protocol import prefixes_of
from vlmrm.settings import validate
from vlmrm.training import train
from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config, model_input
from vlmrm_robots.frames.collecting import collect
from vlmrm_robots.frames.dataset import FrameIndex, Inputs
from vlmrm_robots.frames.frame_reward import FrameReward
from vlmrm_robots.frames.settings import CollectSettings, RewardModelSettings, TrainSettings
from vlmrm_robots.frames.training import FrameTrainer, initial_classifier
from vlmrm_robots.trajectories.rows import write_values
from vlmrm_robots.trajectories.trajectory import Trajectory, find_trajectory, holds, open_folder, write_trajectory

COLLECT = 150.0  # frames a second
COMPUTE = 0.9  # of a training step
SCORE = 1.2  # times the forward pass
ENVIRONMENTS = 64
EPISODES, STEPS = 16, 200
EPOCHS = 4  # of a timed training
PREFIXES = 4.0  # forwards of a prefix each, over one of all
PREFIX_FRAMES, PREFIX_SIDE = 12, 224  # frames of an episode, and their side in pixels: 64 tokens
ROUNDS = 5
STEPS_SCORED = 4  # in a round
FLAT = 1.2  # times the first files of a folder
WRITTEN, TIMED = 2000, 100  # files before those whose writing is timed, and how many those are
LIMIT = 10_000  # files that the folders may hold
KEY = "base_camera"
TASK = "Push the block to the goal."
ORDER = 0.95  # of two frames
SEEDS, SHOWN, STEPS_OF_TRAINING = 3, 5, 300  # models, frames of a clip, and steps of 16 clips


def measure(options: argparse.Namespace) -> list[Row]:
    if options.quick:
        rows = [collection(1, 1), training(1, episodes=2, frames=32, epochs=1), scoring(1)]
        return [*rows, writing(50), prefixes(1, "tiny", frames=4), *progress(1, 4, steps=2)]
    rows = [collection(ROUNDS, EPISODES), training(ROUNDS, episodes=4, frames=256, epochs=EPOCHS), scoring(ROUNDS)]
    rows += [writing(WRITTEN), prefixes(ROUNDS, "h512", frames=PREFIX_FRAMES)]
    return [*rows, *progress(SEEDS, 200, STEPS_OF_TRAINING)]


def collection(rounds: int, episodes: int) -> Row:
    """Measure labelled 64x64 frames of Acrobot a second, from the first reset to the last file."""
    frames = episodes * (STEPS + 1)
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(number) for number in count())

        def collecting() -> Callable[[], object]:
            settings = collect_settings(next(folders), episodes)
            return lambda: collect(settings)

        timings = harness.interleave({"collect": collecting, "plain": lambda: lambda: draw_plainly(frames)}, rounds)
    rates = [frames / seconds for seconds in timings.seconds["collect"]]
    line = row("collect", frames / timings.median("collect"), "frames/s", at_least=COLLECT)
    spread = {"lowest": min(rates), "highest": max(rates)}
    return line | spread | {"seconds": timings.median("collect"), "plain_seconds": timings.median("plain")}


def collect_settings(folder: Path, episodes: int) -> CollectSettings:
    data = {"positive_dir": folder / "positive", "negative_dir": folder / "negative"}
    content = {"env": "Acrobot-v1", "episodes": episodes, "max_steps": STEPS}
    return validate(CollectSettings, content | {"reward": {"collect_data": True, "data_collection": data}}, "collect")


def draw_plainly(frames: int) -> None:
    env = gym.make("Acrobot-v1", render_mode="rgb_array")
    env.reset(seed=0)
    for _ in range(frames):
        picture = Image.fromarray(np.ascontiguousarray(env.render()))
        np.asarray(picture.resize((64, 64), Image.Resampling.BOX))
    env.close()


def training(rounds: int, episodes: int, frames: int, epochs: int) -> Row:
    """Time epochs of resnet10 on 64x64 frames, read from their files, and the same steps without reading."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(collect_settings(folder, episodes))
        (folder / "negative").mkdir(exist_ok=True)
        index = FrameIndex(open_folder(folder / "positive"), [KEY])
        numbers = np.linspace(0, len(index) - 1, frames).astype(int)  # of all files
        settings = TrainSettings(
            positive_dir=folder / "positive",
            negative_dir=folder / "negative",
            output_checkpoint=folder / "model",
            epochs=epochs,
            use_cpu=True,
        )

        def trainer() -> FrameTrainer:
            return FrameTrainer(initial_classifier(settings), settings, index, numbers, numbers, folder)

        def train() -> Callable[[], object]:
            made = trainer()
            return lambda: [made.train_epoch(epoch) for epoch in range(settings.epochs)]

        def bare() -> Callable[[], object]:
            made = trainer()
            in_memory = [
                {key: model_input(it, made.device) if key == KEY else it for key, it in batch.items()}
                for batch in made.batches(0)
            ]
            return lambda: train_bare(made, in_memory, settings.epochs)

        timings = harness.interleave({"bare": bare, "train": train}, rounds)
    share = timings.ratio("bare", "train")
    return row("train_compute_share", share.pop("measured"), "of a step", at_least=COMPUTE) | share


def train_bare(trainer: FrameTrainer, batches: Sequence[Inputs], epochs: int) -> None:
    """Take the steps of a training on batches that the model takes as they are."""
    model, optimizer = trainer.model.train(), trainer.optimizer
    for _ in range(epochs):
        for batch in batches:
            loss = F.binary_cross_entropy_with_logits(
                model(batch), batch["labels"], trainer.weights[batch["labels"].long()]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def scoring(rounds: int) -> Row:
    """Time a step of `FrameReward`, and the forward pass of its frames."""
    torch.manual_seed(0)
    config = classifier_config(image_keys=(KEY,), image_size=(3, 64, 64))
    with tempfile.TemporaryDirectory() as name:
        save_classifier(Path(name) / "model", FrameClassifier(config), config)
        settings = RewardModelSettings(checkpoint_path=Path(name) / "model", device="cpu")
        env = FrameReward(Still(ENVIRONMENTS, (3, 64, 64)), settings)
    model = env.scorer.model
    frames = {KEY: torch.rand(ENVIRONMENTS, 3, 64, 64)}
    actions = np.zeros(ENVIRONMENTS, dtype=np.int64)

    def forward() -> None:
        with torch.inference_mode():
            for _ in range(STEPS_SCORED):
                model(frames)

    def step() -> None:
        for _ in range(STEPS_SCORED):
            env.step(actions)

    timings = harness.interleave({"forward": lambda: forward, "step": lambda: step}, rounds)
    ratio = timings.ratio("step", "forward")
    milliseconds = 1000 * timings.median("step") / STEPS_SCORED
    return row("score_64", ratio.pop("measured"), "x", at_most=SCORE) | ratio | {"milliseconds": milliseconds}


def writing(before: int) -> Row:
    """Time the writing of a short trajectory into a folder of ten files, and into one of thousands."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 3, 64, 64), dtype=np.uint8)
    trajectory = Trajectory({KEY: noise}, np.zeros(20, dtype=np.float32))
    names = (f"{number:016x}" for number in count())

    def store(folder: Path) -> float:
        began, unique = time.perf_counter(), next(names)
        assert find_trajectory(folder, unique) is None and not (folder.exists() and holds(folder, LIMIT))
        write_trajectory(folder, trajectory, unique)
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as name:
        folders = Path(name, "few"), Path(name, "many")
        for folder, files in zip(folders, (10, before), strict=True):
            for _ in range(files):
                store(folder)
        first, last = (median(times) for times in zip(*(map(store, folders) for _ in range(TIMED)), strict=True))
    return row("write_flat", last / first, "x", at_most=FLAT) | {"milliseconds": 1000 * last}


def prefixes(rounds: int, size: str, frames: int) -> Row:
    """Time the forwards of an episode's prefixes: one for each, and one of all."""
    shape = (frames, PREFIX_SIDE, PREFIX_SIDE, 3)
    episode = [Image.fromarray(frame) for frame in np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)]
    with tempfile.TemporaryDirectory() as name:
        scorer = load_local_scorer(reward_checkpoint(Path(name), configuration(size)), dtype="float32", device="cpu")
    items = scorer.rendered(prefixes_of(TASK, episode))

    def in_one() -> list[Any]:
        return scorer.engine.score(items)

    def one_by_one() -> list[Any]:
        return [score for item in items for score in scorer.engine.score([item])]

    difference = np.abs(np.subtract(in_one(), one_by_one())).max()
    if not difference <= 1e-4:
        raise AssertionError(f"the scores of prefixes differ by {difference:.2g}: there is nothing to compare")
    timings = harness.interleave({"alone": lambda: one_by_one, "one": lambda: in_one}, rounds)
    ratio = timings.ratio("alone", "one")
    details = {"difference": difference, "seconds": timings.median("one")}
    return row("prefix_scores", ratio.pop("measured"), "x", at_least=PREFIXES) | ratio | details


def progress(seeds: int, episodes: int, steps: int) -> list[Row]:
    """Train a tiny model for each seed on clips of growing discs, and order the frames of new clips by it."""
    with runs.workplace() as folder:
        found = [in_order(folder / str(seed), seed, episodes, steps) for seed in range(seeds)]
    each = {name: [figures[name] for figures in found] for name in found[0]}
    means = {name: statistics.mean(values) for name, values in each.items()}
    above = [min(it["order"] - it["clock"], it["order"] - it["first_frame"]) for it in found]

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"lowest": min(values), "highest": max(values), "seeds": seeds}

    order = row("progress_order", means.pop("order"), "share of frames two by two", at_least=ORDER)
    beyond = row("above_controls", min(above), "the least of the seeds", at_least=0.0)
    return [order | spread(each["order"]) | means, beyond | spread(above)]


def in_order(folder: Path, seed: int, episodes: int, steps: int) -> dict[str, float]:
    """Return the share of frames in the right order, two by two: of a model, of its rewinds, and of controls."""
    made, new = (
        values_of_discs(folder / name, np.random.default_rng([seed, number]), count)
        for number, (name, count) in enumerate({"train": episodes, "new": max(episodes // 4, 4)}.items())
    )
    keys: dict[str, Any] = {"outputs": ["done=progress", "success=correctness"], "seed": seed, "max_steps": steps}
    keys |= {"per_device_train_batch_size": 16, "learning_rate": 1e-3, "warmup_steps": steps // 12}
    words = runs.training_words(make_tiny(folder / "base"), [made], folder / "out", **keys)
    scorer = load_scorer(train(words).model_dir, dtype="float32")
    shares: dict[str, list[float]] = {name: [] for name in ("order", "rewinds", "clock", "first_frame")}
    for line in map(json.loads, new.read_text().splitlines()):
        way = np.array(line["progress"], dtype=np.float64)
        before, after = np.triu_indices(len(way), 1)
        apart = np.sign(way[after] - way[before])
        if not np.nansum(np.abs(apart)):  # of one frame, or a failure's NaN
            continue
        frames = [Image.open(new.parent / name) for name in line["frames"]]
        shown = {"order": frames, "first_frame": [frames[0]] * len(frames)}
        scores = {name: np.array(scorer.score_prefixes(line["task"], clip)) for name, clip in shown.items()}
        for name, values in {**scores, "clock": np.arange(len(way))}.items():
            right = (1 + np.sign(values[after] - values[before]) * apart) / 2  # a tie is half
            shares[name].append(float(right[apart != 0].mean()))
        if line["category"] == "rewind":
            shares["rewinds"].append(shares["order"][-1])
    return {name: statistics.mean(values) for name, values in shares.items()}


def values_of_discs(folder: Path, rng: np.random.Generator, count: int) -> Path:
    """Write the values of `count` episodes in which a disc grows, to its whole size or in three of ten less far."""
    for number in range(count):
        length, reached = int(rng.integers(6, 15)), 1.0 if rng.random() < 0.7 else rng.uniform(0.3, 0.8)
        light, hue = (int(it) for it in rng.integers(0, 256, 2))
        centre = rng.integers(22, 35, 2)
        frames = []
        for done in np.linspace(0, reached, length):
            image = Image.new("RGB", (56, 56), (light // 2,) * 3)
            corners = [*(centre - 3 - 15 * done), *(centre + 3 + 15 * done)]
            ImageDraw.Draw(image).ellipse(corners, fill=(255, hue, 0))
            frames.append(np.asarray(image).transpose(2, 0, 1))
        labels = (np.arange(length) == length - 1) * (reached == 1.0)
        write_trajectory(folder, Trajectory({KEY: np.stack(frames)}, labels.astype(np.float32)), f"{number:016x}")
    output = folder.with_suffix(".jsonl")
    write_values(open_folder(folder), output, task="Make the disc large.", frames=SHOWN)
    return output


class Still(VectorEnv):
    """Environments in which nothing moves and no time passes."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, count: int, size: tuple[int, int, int]):
        self.num_envs = count
        self.images = np.random.default_rng(0).integers(0, 256, (count, *size), dtype=np.uint8)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        zeros = np.zeros(self.num_envs)
        return zeros, zeros, zeros.astype(bool), zeros.astype(bool), {"images": {KEY: self.images}}


if __name__ == "__main__":
    harness.main("frames", measure, __doc__)

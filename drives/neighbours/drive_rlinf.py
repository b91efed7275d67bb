"""RLinf: reward models of its embodied reward worker: our classifiers of frames, and a service asked of windows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import Case, main, raised, ran, recipe
from omegaconf import OmegaConf
from PIL import Image
from rlinf.models.embodiment.reward import get_reward_model_class
from rlinf.scheduler.cluster.utils import load_user_extension_module
from rlinf.utils.env_helpers import HistoryManager

from vlmrm_robots.frames.classifier import FrameClassifier, classifier_config, model_input
from vlmrm_robots.frames.foreign_classifiers import export_classifier

SIDE = 64


def actor(case: Case) -> str:
    """As the worker does: the class of the registry, its strict load, and rewards of the environment's main images."""
    torch.manual_seed(0)
    model = FrameClassifier(
        classifier_config(
            architecture="resnet18",
            image_keys=("main_images",),
            image_size=(3, SIDE, SIDE),
            hidden_dim=32,
            pooling="average",
            use_pretrain=True,
            freeze_encoder=True,
            normalisation="imagenet",
        )
    ).eval()
    path = Path(case.folder, "reward_model.pt")
    export_classifier(model, path, path)
    asked = {
        "model_type": "resnet",
        "arch": "resnet18",
        "pretrained": False,
        "hidden_dim": 32,
        "image_size": [3, SIDE, SIDE],
        "model_path": str(path),
        "precision": "fp32",
    }
    theirs = get_reward_model_class("resnet")(OmegaConf.create(asked)).eval()
    brightness = np.linspace(0.1, 1, 16)[:, None, None, None]
    pixels = (np.random.default_rng(0).integers(0, 256, (16, SIDE, SIDE, 3)) * brightness).astype(np.uint8)
    rewards = theirs.compute_reward({"main_images": pixels})
    frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        expected = model({"main_images": model_input(frames, model.device)}).sigmoid()
    assert expected.std() > 1e-3, expected
    worst = float((rewards - expected).abs().max())
    assert worst < 1e-6, worst
    return f"its worker's rewards by our classifier, at most {worst:.0e} off"


TASKS = ["Lift the cube.", "Lift the cube.", "Lift the cube."]
FRAMES = 2


def windows(case: Case, url: str) -> tuple[list[list[str]], list[float]]:
    """The frames of environments, as files, and the rewards of their windows by its history and its registry.

    The last environment has just begun, and so has no window yet.
    """
    module = recipe("rlinf_windows", url, case.folder)
    os.environ["RLINF_EXT_MODULE"] = module.__name__
    load_user_extension_module()
    buffers = {"history_window": {"history_size": FRAMES, "min_history_size": FRAMES, "input_interval": 1,
                                  "history_keys": ["main_images"]}}  # fmt: skip
    config = OmegaConf.create({"model": {"model_type": "people", "history_buffers": buffers}})
    history = HistoryManager(config, len(TASKS))
    pictures = [np.array(Image.open(picture).convert("RGB")) for picture in case.pictures]
    shown = [[pictures[0], pictures[1]], [pictures[1], np.rot90(pictures[0], 2).copy()], [pictures[0]] * FRAMES]
    for step in range(FRAMES):
        history.append_to_history_entries({"main_images": torch.from_numpy(np.stack([one[step] for one in shown]))})
        if step == 0:
            history.clear_history(len(TASKS) - 1)
    given, _ = history.build_history_input(torch.zeros(len(TASKS)))
    model = get_reward_model_class(config.model.model_type)(config.model)
    rewards = model.compute_reward({"history_input": given, "task_descriptions": TASKS})
    files = [[str(Path(case.folder, f"frame_{env}_{step}.png")) for step in range(FRAMES)] for env in range(2)]
    for names, frames in zip(files, shown, strict=False):
        for name, frame in zip(names, frames, strict=True):
            Image.fromarray(frame).save(name)
    return files, rewards.tolist()


def equal(case: Case) -> dict[str, Any]:
    files, rewards = windows(case, case.url)
    assert rewards[2] == 0.0, rewards
    return ran("windows in its history and registry", [
        {"messages": [{"role": "user", "content": task},
                      {"role": "assistant", "content": [{"type": "video", "video": frames}]}], "reward": reward}
        for task, frames, reward in zip(TASKS[:2], files, rewards[:2], strict=True)
    ])  # fmt: skip


def away(case: Case) -> str:
    return raised(lambda: windows(case, case.away), "RewardError", case.away)


if __name__ == "__main__":
    main({"equal": equal, "away": away, "actor": actor})

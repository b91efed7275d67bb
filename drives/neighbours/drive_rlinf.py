"""RLinf: the reward model of its embodied reward worker takes classifiers of vlmrm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from checks import Case, main
from omegaconf import OmegaConf
from rlinf.models.embodiment.reward import get_reward_model_class

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


if __name__ == "__main__":
    main({"actor": actor})

"""verl-omni: its managers of visual rewards take the adapter's function, and its client asks the service.

Its package imports vLLM-Omni, which needs CUDA: its modules are imported without the package's own `__init__`.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from checks import QUESTION, Case, drawn, line, main, raised
from omegaconf import OmegaConf
from PIL import Image
from verl import DataProto

from vlmrm.adapters.verl_reward import compute_score

for name in ("verl_omni", "verl_omni.reward_loop", "verl_omni.reward_loop.reward_manager"):
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(Path(folder, *name.split("."))) for folder in sys.path]

from verl_omni.reward_loop.reward_manager.multi import MultiVisualRewardManager  # noqa: E402
from verl_omni.reward_loop.reward_manager.visual import VisualRewardManager  # noqa: E402
from verl_omni.utils.reward_score import http_scorer_client  # noqa: E402

LOOP = asyncio.Runner()  # its client keeps a session
CONFIG = {"actor_rollout_ref": {"rollout": {"pipeline": {"output_type": "image"}}}}
OURS = {"path": "pkg://vlmrm.adapters.verl_reward", "name": "compute_score", "required": True}


def pixels(picture: str) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(picture).convert("RGB"))).permute(2, 0, 1)


def managed(url: str, picture: str, many: bool = False) -> float:
    """The reward of its manager for images, or of many rewards, with vlmrm's function."""
    data = DataProto.from_single_dict(
        {
            "responses": pixels(picture)[None],
            "data_source": np.array(["drawn"], dtype=object),
            "reward_model": np.array([{"ground_truth": QUESTION}], dtype=object),
            "extra_info": np.array([{"index": 7}], dtype=object),
        }
    )

    async def reward() -> float:
        if many:
            config = OmegaConf.create({**CONFIG, "reward": {"reward_functions": {"people": {**OURS, "model": url}}}})
            manager = MultiVisualRewardManager(config, None, None)
        else:
            manager = VisualRewardManager(OmegaConf.create(CONFIG), None, partial(compute_score, model=url))
        return (await manager.run_single(data))["reward_score"]

    return LOOP.run(reward())


def asked(url: str, picture: str) -> float:
    """The reward of its client."""
    score = http_scorer_client.compute_score(pixels(picture), QUESTION, server_url=f"{url}/verl_omni", max_retries=0)
    return LOOP.run(score)["score"]


def equal(case: Case) -> list[dict[str, Any]]:
    rows = []
    for number, picture in enumerate(case.pictures):
        sent = Path(case.folder, f"sent_{number}.jpg")  # what its client sends
        sent.write_bytes(http_scorer_client._prepare_image_bytes(pixels(picture)))
        rows += [drawn(picture, managed(case.url, picture, many)) for many in (False, True)]
        rows.append(drawn(str(sent), asked(case.url, picture)))
    return rows


def broken(case: Case) -> str:
    raised(partial(asked, case.url, line(case.folder)), "HTTP 400", "400x1 pixels")
    raised(partial(managed, case.url, line(case.folder), many=True), "RuntimeError", "sample 7 of drawn")
    return raised(partial(managed, case.url, line(case.folder)), "RewardError", "sample 7 of drawn")


def away(case: Case) -> str:
    raised(partial(asked, case.away, case.pictures[0]), "HTTP scoring failed")
    return raised(partial(managed, case.away, case.pictures[0]), "cannot be reached")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})

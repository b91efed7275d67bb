"""Runs a reward handler that was written for cosmos-rl's service: `set_up` once, `calculate_reward` per request.

engine = "cosmos_handler.CosmosHandler"
import_from = ["my_rewards"]
options = { handler = "new_reward.NewReward" }
"""

import importlib
import io
import math
import uuid

import numpy as np
import torch


class CosmosHandler:
    """The class `handler`, made with the settings of the configuration and set up.

    The samples of one request are one call, as in cosmos-rl: `images` is uint8, [B, H, W, C], or [B, C, T, H, W] of
    videos. `score_key` is the reward in protocols with one; by default the first that is a number.
    """

    def __init__(self, handler, model_path="", device="", score_key="", **options):
        module, _, name = handler.rpartition(".")
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.score_key = score_key
        cls = getattr(importlib.import_module(module), name)
        self.handler = cls(model_path=model_path, device=self.device, **options)
        self.handler.set_up()
        self.name = getattr(self.handler, "reward_name", name)
        self.info = {"kind": "samples", "handler": handler}

    def __call__(self, items):
        requests = {}
        for index, item in enumerate(items):
            requests.setdefault(item.get("group") or index, []).append(index)
        outcomes = [{} for _ in items]
        for indices in requests.values():
            scored = self.request([items[index] for index in indices])
            for index, outcome in zip(indices, scored, strict=True):
                outcomes[index] = outcome
        return outcomes

    def request(self, items):
        """Return the outcomes of one request's items: all have scores, or all the same error."""
        name = "video" if "video" in items[0] else "image"
        arrays = [read_array(item.get(name)) for item in items]
        if len({array.shape for array in arrays}) > 1:
            return [{"error": f"the {name}s of one request differ in size: resize them to one"}] * len(items)
        tensor = torch.from_numpy(np.stack(arrays))
        # From [B, C, H, W] and [B, T, C, H, W].
        images = tensor.permute(0, 2, 3, 1) if name == "image" else tensor.permute(0, 2, 1, 3, 4)
        result = self.handler.calculate_reward(images.contiguous().to(self.device), self.metadata(items, images, name))
        if result.get("scores") is None:
            return [{"error": f"{self.name}: {result.get('error') or 'it has no scores'}"}] * len(items)
        return [self.outcome(select(result["scores"], index, len(items))) for index in range(len(items))]

    def metadata(self, items, images, name):
        info = {
            "shape": list(images.shape),
            "dtype": str(images.dtype),
            "min": f"{images.min().item():.3f}",
            "max": f"{images.max().item():.3f}",
        }
        return {
            "media_type": name,
            "video_infos": [{"video_fps": item["fps"]} for item in items if "fps" in item],
            **(items[0].get("request") or {}),
            "prompts": [item["prompt"] for item in items],
            "reward_fn": {self.name: 1.0},
            "uuid": str(uuid.uuid4()),
            "input_info": info,
            "decoded_info": {"shape": info["shape"], "dtype": info["dtype"]},
            "decode_duration": "0.00",
        }

    def outcome(self, scores):
        for key, value in flatten(scores):
            if isinstance(value, float) and not math.isfinite(value):
                return {"error": f"its {key} is {value}"}
        numbers = {key: value for key, value in scores.items() if isinstance(value, (int, float))}
        key = self.score_key or next(iter(numbers), "")
        if key not in numbers:
            return {"error": f"{self.name} returned no number under {key or 'any key'}: set score_key"}
        return {"score": float(numbers[key]), "extra": {"scores": scores}}


def read_array(medium):
    """Return an image [C, H, W] or a video [T, C, H, W]; a medium that is a file is an image."""
    if not isinstance(medium, dict):
        raise ValueError("a sample has neither an image nor a video")
    if "npy" in medium:
        return np.load(io.BytesIO(medium["npy"]), allow_pickle=False)
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(medium["bytes"])).convert("RGB")).transpose(2, 0, 1)


def select(scores, index, size):
    """Return the scores of one sample from lists of `size` values under each key, nested or not."""
    selected = {}
    for key, value in scores.items():
        if isinstance(value, dict):
            selected[key] = select(value, index, size)
            continue
        values = value.tolist() if hasattr(value, "tolist") else list(value)
        if len(values) != size:
            raise ValueError(f"there are {len(values)} of {key} for {size} samples")
        selected[key] = values[index].item() if hasattr(values[index], "item") else values[index]
    return selected


def flatten(scores):
    for key, value in scores.items():
        if isinstance(value, dict):
            yield from flatten(value)
        else:
            yield key, value

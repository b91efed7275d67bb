"""Runs a reward that was written for cosmos-rl's service: `set_up` once, `calculate_reward` for each request.

    engine = "cosmos_handler.CosmosHandler"
    import_from = ["my_rewards"]
    options = { handler = "new_reward.NewReward" }

Needs torch and numpy in the reward's environment, and the handler's own dependencies; nothing of this project.
"""

import importlib
import io
import math
import uuid

import numpy as np
import torch


class CosmosHandler:
    """Makes the class `handler` with the settings of the configuration, and sets it up.

    The samples of one request are one call, as there: `images` is uint8 [B, H, W, C] of images and [B, C, T, H, W] of
    videos, on `device`; `metadata` has `prompts`, `media_type`, `video_infos` and whatever else the client sent.

    Args:
        score_key: which of its scores is the reward in protocols that have one; its first that is a number.
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
        for number, item in enumerate(items):
            requests.setdefault(item.get("group") or number, []).append(number)
        outcomes = [{} for _ in items]
        for numbers in requests.values():
            answers = self.request([items[number] for number in numbers])
            for place, number in enumerate(numbers):
                outcomes[number] = answers[place]
        return outcomes

    def request(self, items):
        """The outcomes of one request's items: all have scores, or all the same error."""
        name = "video" if "video" in items[0] else "image"
        arrays = [array_of(item.get(name)) for item in items]
        if len({array.shape for array in arrays}) > 1:
            return [{"error": f"the {name}s of one request differ in size: resize them to one"}] * len(items)
        tensor = torch.from_numpy(np.stack(arrays))
        # From [B, C, H, W] and [B, T, C, H, W].
        images = tensor.permute(0, 2, 3, 1) if name == "image" else tensor.permute(0, 2, 1, 3, 4)
        result = self.handler.calculate_reward(images.contiguous().to(self.device), self.metadata(items, images, name))
        if result.get("scores") is None:
            return [{"error": f"{self.name}: {result.get('error') or 'it has no scores'}"}] * len(items)
        return [self.outcome(sample(result["scores"], number, len(items))) for number in range(len(items))]

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
        for key, value in flat(scores):
            if isinstance(value, float) and not math.isfinite(value):
                return {"error": f"its {key} is {value}"}
        numbers = {key: value for key, value in scores.items() if isinstance(value, (int, float))}
        key = self.score_key or next(iter(numbers), "")
        if key not in numbers:
            return {"error": f"{self.name} answered no number under {key or 'any key'}: set score_key"}
        return {"score": float(numbers[key]), "extra": {"scores": scores}}


def array_of(medium):
    """Images [C, H, W] and videos [T, C, H, W] as they are sent; a file is an image."""
    if not isinstance(medium, dict):
        raise ValueError("a sample has neither an image nor a video")
    if "npy" in medium:
        return np.load(io.BytesIO(medium["npy"]), allow_pickle=False)
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(medium["bytes"])).convert("RGB")).transpose(2, 0, 1)


def sample(scores, number, size):
    """What the scores, lists of one value a sample under each key, say of one of them."""
    found = {}
    for key, value in scores.items():
        if isinstance(value, dict):
            found[key] = sample(value, number, size)
            continue
        values = value.tolist() if hasattr(value, "tolist") else list(value)
        if len(values) != size:
            raise ValueError(f"there are {len(values)} of {key} for {size} samples")
        found[key] = values[number].item() if hasattr(values[number], "item") else values[number]
    return found


def flat(scores):
    for key, value in scores.items():
        if isinstance(value, dict):
            yield from flat(value)
        else:
            yield key, value

"""Rewards for workers, without vlmrm or torch: the length of a prompt, and whatever can go wrong."""

import os
import signal
import sys
import time
from typing import ClassVar


class Length:
    """Scores the length of the prompt; `log` is a file that each batch's prompts are written to.

    A prompt may say what happens instead: "die", "die once FILE", "hang", "raise", "refuse", or "wait FILE", of which
    `services.Gate` tells.
    """

    def __init__(self, log=None, info=None):
        self.log = log
        self.info = {"kind": "samples", "python": sys.executable, **(info or {})}

    def __call__(self, items):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write("|".join(item["prompt"] for item in items) + "\n")
        return [self.outcome(item["prompt"]) for item in items]

    def outcome(self, prompt):
        wait_at(prompt)
        what, _, path = prompt.partition(" once ")
        if path:
            if os.path.exists(path):
                return {"score": 1.0}
            open(path, "w").close()
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(3600)
        if what == "raise":
            raise RuntimeError("out of memory")
        return {"error": "it is refused"} if what == "refuse" else {"score": float(len(prompt))}


def wait_at(prompt):
    """Of "wait FILE": says in FILE.reached which process waits, and does until there is FILE."""
    what, _, path = prompt.partition(" ")
    if what == "wait":
        with open(path + ".reached", "w") as file:
            file.write(str(os.getpid()))
        while not os.path.exists(path):
            time.sleep(0.01)


class Weights:
    """Scores the number that its weights are; a file `wait` there is a prompt at which it waits as it loads."""

    def __init__(self, model_path):
        self.info = {"model": model_path}
        with open(model_path + "/model.safetensors") as file:
            self.number = float(file.read())
        if os.path.exists(model_path + "/wait"):
            with open(model_path + "/wait") as file:
                wait_at(file.read())

    def __call__(self, items):
        for item in items:
            wait_at(item["prompt"])
        return [{"score": self.number} for _ in items]

    def sleep(self):
        self.number = -self.number

    def wake(self):
        self.number = -self.number


class Settings(Length):
    """`Length`, which takes the settings of a model."""

    def __init__(self, dtype="", device="", **options):
        super().__init__(**options)


class Dice(Length):
    """`Length`, which says that it would answer otherwise another time."""

    def __init__(self, **options):
        super().__init__(**options)
        self.info["deterministic"] = False


class Broken:
    """Cannot be loaded; `prompt` may have it wait before it says so."""

    def __init__(self, prompt=""):
        wait_at(prompt)
        raise FileNotFoundError("weights.bin")


class ConfigError(Exception):
    """Called as the error of a configuration that cannot work."""


class Misconfigured:
    """Cannot be loaded however often."""

    def __init__(self):
        raise ConfigError("device is cuda:9, which this machine does not have.")


class GroupSize:
    """Scores how many items are in the item's group."""

    def __call__(self, items):
        for item in items:
            wait_at(item["prompt"])
        groups = [item.get("group") for item in items]
        return [{"score": float(groups.count(group))} for group in groups]


class NotANumber:
    def __call__(self, items):
        return [{"score": float("nan")} for _ in items]


class Extra:
    """Says under `extra` what the prompt names: "nan", a number that is none, or "set", what no JSON can be."""

    values: ClassVar = {"nan": [float("nan"), {"most": float("inf")}, 1.5], "set": {1, 2}}

    def __call__(self, items):
        return [{"score": 1.0, "extra": {"values": self.values.get(item["prompt"], 0)}} for item in items]


class Characters:
    """A tenth for each character of a conversation, in whichever form it comes, and one for each picture."""

    info: ClassVar = {"kind": "conversations"}

    def __call__(self, items):
        return [{"score": self.score(item)} for item in items]

    def score(self, item):
        if "messages" in item:
            parts = [part for message in item["messages"] for part in message["content"]]
            shown = sum(part["type"] == "image" for part in parts)
            text = "".join(part.get("text", "") for part in parts)
        else:
            shown = len([item["image"]] if "image" in item else item.get("condition_images", []))
            text = item["prompt"] + item.get("response", "")
        return len(text) / 10 + shown


class ImageBytes:
    """Scores how many bytes the file of the image has."""

    def __call__(self, items):
        return [{"score": len(item["image"]["bytes"])} for item in items]


class Leaky:
    """Says its key and a path wherever it can."""

    def __init__(self, api_key, folder):
        self.text = f"cannot read {folder}/weights.bin with the key {api_key}"
        self.info = {"model": self.text}

    def __call__(self, items):
        if items[0]["prompt"] == "raise":
            raise RuntimeError(self.text)
        return [{"error": self.text} if item["prompt"] == "item" else {"score": 1.0} for item in items]


class Environment:
    """Scores whether the variable that the prompt names is set."""

    def __call__(self, items):
        return [{"score": item["prompt"] in os.environ} for item in items]


class Frames:
    """Scores how many frames the video has."""

    def __call__(self, items):
        import io

        import numpy as np

        return [{"score": float(len(np.load(io.BytesIO(item["video"]["npy"]))))} for item in items]


class Brightness:
    """Scores the mean of the image's or video's values."""

    def __call__(self, items):
        import io

        import numpy as np

        media = [item.get("image") or item["video"] for item in items]
        return [{"score": float(np.load(io.BytesIO(one["npy"])).mean())} for one in media]


class ThreeQualities:
    """What VideoAlign says of a video: how many frames it has, the length of the prompt, and 0.5."""

    def __call__(self, items):
        import io

        import numpy as np

        lengths = [(len(np.load(io.BytesIO(item["video"]["npy"]))), len(item["prompt"])) for item in items]
        return [
            {"score": 0, "extra": {"VQ": one, "MQ": other, "TA": 0.5, "overall": one + other + 0.5}}
            for one, other in lengths
        ]


class Anything:
    """Scores whatever it is given, and says what metadata came with it."""

    def __call__(self, items):
        return [{"score": 1.0, "extra": {"metadata": item.get("metadata")}} for item in items]


class LastText(Length):
    """`Length` of the answers of conversations."""

    def __call__(self, items):
        return super().__call__([{"prompt": item["messages"][-1]["content"][0]["text"]} for item in items])


class Answers:
    """Scores the length of the answer; below zero where it holds a bracket."""

    def __call__(self, items):
        return [self.outcome(item["prompt"], item.get("response", "")) for item in items]

    def outcome(self, prompt, answer):
        if prompt == "raise":
            raise RuntimeError("out of memory")
        if answer == "refuse":
            return {"error": "it is refused"}
        return {"score": -len(answer) if "<" in answer else len(answer)}


class Prepared(Length):
    """`Length` with two steps. Its prompts say in which one they mean what they say: "prepare: PROMPT" in the first.

    `log` has the prompts of each batch that is prepared, and "computed" for each that is computed.
    """

    def __call__(self, items):
        raise AssertionError("it is not called")

    def prepare(self, items):
        self.note("|".join(item["prompt"] for item in items))
        for item in items:
            what, _, prompt = item["prompt"].partition("prepare: ")
            if not what:
                self.outcome(prompt)
        return [item["prompt"] for item in items]

    def compute(self, prepared):
        outcomes = [self.outcome(prompt) for prompt in prepared]
        self.note("computed")
        return outcomes

    def note(self, line):
        with open(self.log, "a") as file:
            file.write(line + "\n")

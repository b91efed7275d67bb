"""The vision tower in training: operations and host waits of a micro-batch, and seconds of the tower alone.

A micro-batch is one pair about one image of 1260 x 1260 pixels, 8 layers of Qwen2.5-VL's tower, two of which see the
whole image and six windows of it, 4 layers of text, all of them trained with activation checkpointing. It is counted
in a training, from one micro-batch to the next. `library` is the same under transformers' own sdpa.

`vision_ops` are the operators that torch's profiler sees. `host_waits` are those of its operators that answer a number
to the host or a tensor of unknown length (`WAITS`), and calls that read a whole tensor (`READS`), counted on a CPU. A
GPU has neither of the two that are ours: one reads grids that stay on the host, one checks a CPU's attention mask.
Reads alone: copies to a GPU, which may wait too, do not happen on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2_5_VLConfig

from benchmarks import harness
from benchmarks.harness import Row, row
from benchmarks.runs import picture_pairs, training_words, workplace
from vlmrm.batching.media import Grid
from vlmrm.modeling import families, make_tiny, reward_model_class
from vlmrm.modeling.vision import tower_keywords
from vlmrm.training.trainer import ComparisonTrainer

SIDE, QUICK_SIDE = 1260, 140  # pixels
VISION_LAYERS, TEXT_LAYERS = 8, 4
VISION_OPS, HOST_WAITS = 12_000, 2
ROUNDS = 5

# `item` and `is_nonzero` call the first of them.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim")
READS = ("tolist", "numpy", "cpu", "__array__")


def measure(options: argparse.Namespace) -> list[Row]:
    side = QUICK_SIDE if options.quick else SIDE
    ours, library = (harness.in_new_process(micro_batch, way, side) for way in ("ours", "library"))
    rows = [
        row("vision_ops", ours.operators, "operators", at_most=VISION_OPS, library=library.operators),
        row("host_waits", sum(ours.waits.values()), "waits", at_most=HOST_WAITS, library=sum(library.waits.values())),
    ]
    timings = harness.interleave(towers(side), 1 if options.quick else ROUNDS)
    ratio = timings.ratio("library", "ours")
    seconds = {f"{way}_seconds": timings.median(way) for way in ("library", "ours")}
    return [*rows, row("tower_step", **ratio, unit="x library", **seconds)]


@dataclasses.dataclass
class Counts:
    """Operators that ran, and those that the host waits for, by name."""

    operators: int
    waits: Counter[str]


class Reads(TorchFunctionMode):
    """Counts calls that copy a whole tensor to the host, of which the profiler sees nothing on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in READS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Counting:
    """Counts the second micro-batch of a training, from the beginning of its step to that of the next."""

    def __init__(self) -> None:
        self.steps = 0
        self.counts: Counts | None = None
        self._stack = ExitStack()

    def before_step(self) -> None:
        self.steps += 1
        if self.steps == 2:
            self._profile = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
            self._reads = self._stack.enter_context(Reads())
        elif self.steps == 3:
            self._stack.close()
            names = [event.name for event in self._profile.events() or () if event.name.startswith("aten::")]
            seen = Counter(name.removeprefix("aten::") for name in names)
            waits = Counter({name: seen[name] for name in WAITS if seen[name]})
            self.counts = Counts(len(names), waits + self._reads.calls)


def micro_batch(way: str, side: int) -> Counts:
    """Return the counts of a micro-batch with an image of `side` pixels; `way` is `ours` or `library`."""
    if way == "library":
        own = families.BY_MODEL_TYPE["qwen2_5_vl"]
        families.BY_MODEL_TYPE["qwen2_5_vl"] = dataclasses.replace(own, host_layout=False, in_place=False)
    counting = Counting()
    step = ComparisonTrainer.training_step

    def counted(self: ComparisonTrainer, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if way == "library":
            self.reward_model.model.visual.config._attn_implementation = "sdpa"
        counting.before_step()
        return step(self, model, *args, **kwargs)

    ComparisonTrainer.training_step = counted
    try:
        with workplace() as folder:
            train_shortly(folder, side)
    finally:
        ComparisonTrainer.training_step = step
    assert counting.counts is not None
    return counting.counts


def train_shortly(folder: Path, side: int) -> None:
    """Train for one step of three micro-batches."""
    from vlmrm.training import train

    base = make_tiny(folder / "base")
    config: Any = AutoConfig.from_pretrained(base)
    config.text_config.num_hidden_layers = TEXT_LAYERS
    config.text_config.layer_types = ["full_attention"] * TEXT_LAYERS
    config.vision_config.depth = VISION_LAYERS
    config.vision_config.fullatt_block_indexes = [VISION_LAYERS // 2 - 1, VISION_LAYERS - 1]
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(base)
    data = picture_pairs(folder / "data", 3, pictures=3, size=(side, side))
    shape = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 1}
    shape |= {"gradient_checkpointing": True, "check_sight": False, "max_pixels": side**2}
    train(training_words(base, data, folder / "out", **shape))


def towers(side: int) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return forward and backward of the tower with an image of `side` pixels, for `harness.interleave`."""
    vision = {"depth": VISION_LAYERS, "hidden_size": 128, "intermediate_size": 342, "num_heads": 4}
    vision |= {"out_hidden_size": 256, "fullatt_block_indexes": [VISION_LAYERS // 2 - 1, VISION_LAYERS - 1]}
    text = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 256, "vocab_size": 64, "pad_token_id": 0}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": None}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    tower: Any = reward_model_class(config)(config).model.visual
    grid: Grid = (1, side // tower.patch_size, side // tower.patch_size)
    pixels = torch.randn(grid[1] * grid[2], 3 * 2 * tower.patch_size**2)
    ours = tower.config._attn_implementation

    def step(attention: str) -> Callable[[], Any]:
        tower.config._attn_implementation = attention
        tower.zero_grad()

        def run() -> None:
            keywords = tower_keywords(tower, [grid], pixels.device) if attention == ours else {}
            tower(pixels, torch.tensor([grid]), **keywords).pooler_output.sum().backward()

        return run

    return {"library": lambda: step("sdpa"), "ours": lambda: step(ours)}


if __name__ == "__main__":
    harness.main("vision", measure, __doc__)

"""Shared by benchmarks of complete runs: a temporary folder to run in, checkpoints, and preferences about pictures."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from vlmrm.batching import Batch, ComparisonCollator
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.modeling import (
    RewardModel,
    batcher_for,
    load_for_training,
    load_processor,
    make_tiny,
    save_reward_files,
    write_complete,
)
from vlmrm.rendering import Renderer

# Large enough that a step is more than overhead, and small enough that opening pictures would be felt.
MIDDLE: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
}


@contextmanager
def workplace() -> Generator[Path]:
    """Run in a temporary folder, where tables are cached too, so that nothing remains."""
    from datasets import config

    before, cache = Path.cwd(), config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        config.HF_DATASETS_CACHE = Path(name, "tables")
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            config.HF_DATASETS_CACHE = cache


def base_model(folder: Path, quick: bool, size: dict[str, int] = MIDDLE) -> Path:
    """Write a generative checkpoint with random weights: the tiny one, with a text model of `size` unless `quick`."""
    make_tiny(folder)
    if not quick:
        config: Any = AutoConfig.from_pretrained(folder)
        for name, value in size.items():
            setattr(config.text_config, name, value)
        config.text_config.layer_types = ["full_attention"] * size["num_hidden_layers"]
        config.vision_config.out_hidden_size = size["hidden_size"]
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def reward_checkpoint(base: Path, folder: Path, seed: int) -> Path:
    """Write the base with an untrained head, as training saves it."""
    load_for_training(base, seed=seed, dtype=torch.float32).save_pretrained(folder)
    processor = load_processor(base)
    save_reward_files(folder, processor=processor, head="linear", provenance={})
    write_complete(folder, world_size=1, step=seed)
    return folder


def picture_pairs(folder: Path, count: int, pictures: int, size: tuple[int, int] = (640, 480)) -> Path:
    """Write a file of `count` preference pairs about `pictures` JPEG files of random blots."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(pictures):
        blots = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        blots.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=88)
    path = folder / "pairs.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            row: dict[str, Any] = {
                "id": f"pair-{number}",
                "image": f"{number % pictures}.jpg",
                "prompt": f"What is shown in picture number {number}?",
                "chosen": f"It is the digit {number % 10}, written by hand.",
                "rejected": f"There is no digit, but {number % 7} blots.",
            }
            file.write(json.dumps(row) + "\n")
    return path


def collator(model: RewardModel, processor: Any) -> ComparisonCollator:
    """Return the collator of a training or sweep with default keys."""
    longest = model.config.get_text_config().max_position_embeddings
    return ComparisonCollator(Renderer(processor), batcher_for(model, processor, "shared"), max_seq_length=longest)


def batches(collator: ComparisonCollator, data: Path, size: int) -> list[Batch]:
    """Return the rows of a data file in order, as prepared batches."""
    rows: Any = load_comparisons([str(data)], arguments=DataArguments(dataset_path=[str(data)]))
    return [collator([rows[i] for i in range(at, min(at + size, len(rows)))]) for at in range(0, len(rows), size)]


def words(**keys: Any) -> list[str]:
    """Return configuration keys as command-line words; a list becomes several values of its key."""
    line: list[str] = []
    for name, value in keys.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        line += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return line


def training_words(model: Path, data: Any, output: Path, **keys: Any) -> list[str]:
    """Return the words of a training on a CPU that neither evaluates nor saves before its end."""
    return words(
        model_name_or_path=model,
        dataset_path=data,
        output_dir=output,
        **{
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "attn_implementation": "sdpa",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **keys,
        },
    )

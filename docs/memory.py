"""Write the memory of a process, traced, into the headers of training_configs and the table of docs/performance.md.

Configurations of models are those of tests/modeling/published, without weights. Run it as `python docs/memory.py`; it
takes some minutes.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from vlmrm.data.comparisons import load_train_and_eval
from vlmrm.logs import say
from vlmrm.modeling.checkpoint import load_processor
from vlmrm.modeling.tiny import make_tiny
from vlmrm.training import memory
from vlmrm.training.arguments import RunArguments
from vlmrm.training.build import build_collator
from vlmrm.training.fit import TWICE, Fit, fit_into
from vlmrm.training.memory import Memory, estimate_memory
from vlmrm.training.survey import survey

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "training_configs"
PUBLISHED = ROOT / "tests" / "modeling" / "published"
PERFORMANCE = ROOT / "docs" / "performance.md"
CUDA = 1.5  # GB: its context, its libraries, and what the allocator cannot use
TEXT = 64  # tokens of the template, at most
EVALUATION = ("eval_fraction", "load_best", "metric", "greater")  # keys that do not go without it

# The table: a batch of two pairs, each with an image of 1000x750 pixels and two answers of 300 tokens.
BATCH = {"pairs": 2, "size": (1000, 750), "prompt": 20, "answer": 300}
MODELS = ["qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b", "qwen3-vl-30b-a3b"]
LORA = {"use_peft": True, "lora_r": 16}
ZERO2, ZERO3 = ({"deepspeed": ROOT / f"zero{stage}.json"} for stage in (2, 3))
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "full, ZeRO-2": (ZERO2, 8),
    "full, ZeRO-3": (ZERO3, 8),
    "full, FSDP2": ({"fsdp": True}, 8),
    "LoRA": (LORA, 1),
    "QLoRA": (LORA | {"load_in_4bit": True}, 1),
}


def checkpoint(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write the configuration of a published checkpoint, with a tiny tokenizer whose special tokens it then has.

    `layers` are those of its language model; its tower then has one.
    """
    config = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    if layers is not None:
        config["num_hidden_layers"], config["vision_config"]["depth"] = layers, 1
    make_tiny(folder, "qwen3_vl" if name.startswith("qwen3") else "qwen2_5_vl")
    tiny = json.loads((folder / "config.json").read_text())
    config |= {key: value for key, value in tiny.items() if key.endswith("token_id")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    return folder


def pairs(folder: Path, count: int, size: tuple[int, int], prompt: int, answer: int) -> Path:
    """Write pairs with one image each, prompts of so many words and two answers; a word is a token."""
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", size).save(folder / f"{number}.png")
    rows = [
        {
            "prompt": " digit" * prompt + str(number),
            "chosen": " digit" * answer,
            "rejected": " number" * answer,
            "images": [f"{number}.png"],
        }
        for number in range(count)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def traced(
    keys: dict[str, Any], model: str, ranks: int, batch: dict[str, Any], layers: int | None = None, free: float = 0.0
) -> tuple[Memory, Fit | None]:
    """Return the memory of a process that trains a published model with these keys, on a GPU; `layers` cut it.

    With `free` bytes on the GPU also what `auto` stands for.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = checkpoint(model, folder / "model", layers)
        # Others' prompts are needed for irrelevant pairs.
        data = pairs(folder / "data", 4 * batch["pairs"], batch["size"], batch["prompt"], batch["answer"])
        keys = keys | {
            "model_name_or_path": path,
            "dataset_path": data,
            "output_dir": folder / "out",
            "per_device_train_batch_size": batch["pairs"],
            "eval_strategy": "no",
            "use_cpu": True,
        }
        keys = {
            key: value for key, value in keys.items() if not key.startswith(("eval_f", "load_best", "metric", "great"))
        }
        words = [f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in keys.items()]
        run = RunArguments.parse(words, "docs/memory.py")
        processor = load_processor(path)
        dataset = load_train_and_eval(run.data)[0]
        rows = survey(dataset, build_collator(run, processor), 0)
        assert not rows.dropped, rows.last_reason
        fitted = fit_into(free, run, ranks, processor, dataset, rows) if free else None
        if fitted is not None:
            fitted.apply(run)
        return estimate_memory(run, ranks, processor, dataset, rows), fitted


def remembered(trace: Callable[..., int]) -> Callable[..., int]:
    """Return `trace_step` that traces once what several configurations have in common."""
    traces: dict[tuple[Any, ...], int] = {}

    def trace_once(model: Any, inputs: Any, **keys: Any) -> int:
        weights = [(weight.shape, weight.dtype, weight.requires_grad) for weight in model.parameters()]
        twice = [getattr(module, "gradient_checkpointing", False) for module in model.modules()]
        key = (*weights, *twice, inputs["input_ids"].shape, *keys.items())
        if key not in traces:
            traces[key] = trace(model, inputs, **keys)
        return traces[key]

    return trace_once


def model_of(keys: dict[str, Any]) -> str:
    """Return the name of the published configuration of a model."""
    name = keys["model_name_or_path"].rpartition("/")[2].lower()
    return "mimo-vl-7b" if name.startswith("mimo") else name.removesuffix("-instruct")


def longest_batch(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the largest rows that the keys allow: images of `max_pixels`, conversations of `max_seq_length`."""
    side = 28 * int(math.sqrt(keys["max_pixels"]) // 28)
    text = keys["max_seq_length"] - (side // 28) ** 2 - TEXT
    return {
        "pairs": keys["per_device_train_batch_size"],
        "size": (side, side),
        "prompt": text // 2,
        "answer": text // 2,
    }


def with_engine(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with the path of the engine's file from any folder."""
    return keys | ({"deepspeed": ROOT / keys["deepspeed"]} if "deepspeed" in keys else {})


def ranks_of(machine: str) -> int:
    """Return the number of GPUs in words such as `one GPU of 24 GB`."""
    count = machine.partition(" ")[0]
    return 1 if count == "one" else int(count)


def header(keys: dict[str, Any], machine: str, needed: Memory, fitted: Fit) -> str:
    """Return the sentence of a configuration's header that says what it takes."""
    engine = keys.get("deepspeed", "")
    rest = " or float32 gradients" * bool(engine) + " and gathered weights" * ("zero3" in engine)
    parts = {
        "weights": needed.weights,
        "gradients and optimizer": needed.gradients + needed.optimizer,
        f"activations of {fitted.tokens:,} tokens and patches{rest}": needed.rest,
        "CUDA": CUDA * 1e9,
    }
    figures = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts.items())
    total = sum(round(size / 1e9, 1) for size in parts.values())
    needs = f"For {machine} (estimated, not measured): {figures}: {total:.1f} GB{' in each' * bool(engine)}."
    needs += f" {TWICE[fitted.every].capitalize()} is computed twice."
    return needs + " Needs the extra qlora." * bool(keys.get("load_in_4bit"))


def write_header(path: Path) -> None:
    """Trace a configuration, and write what it needs into its header."""
    text = path.read_text()
    keys = yaml.safe_load(text)
    found = re.search(r"^# For (.*?) \(estimated.*?(?=^# Launch)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, path
    machine = " ".join(found[1].replace("#", " ").split())
    free = 1e9 * (float(machine.split()[-2]) - CUDA)
    needed, fitted = traced(with_engine(keys), model_of(keys), ranks_of(machine), longest_batch(keys), free=free)
    assert fitted is not None
    lines = textwrap.wrap(header(keys, machine, needed, fitted), 116)
    path.write_text(text.replace(found[0], "".join(f"# {line}\n" for line in lines)))
    say("\n".join([path.name, *lines]))


def table() -> str:
    """Return the table of docs/performance.md: what each method needs in each GPU."""
    names = [f"{method}, {ranks} GPU{'s' * (ranks > 1)}" for method, (_, ranks) in METHODS.items()]
    lines = [f"| model | {' | '.join(names)} |", "|---" * (len(METHODS) + 1) + "|"]
    for model in MODELS:
        needed = [
            traced(keys | {"bf16": True, "gradient_checkpointing": True}, model, ranks, BATCH)[0].total
            for keys, ranks in METHODS.values()
        ]
        lines.append(f"| {model} | {' | '.join(f'{total / 1e9:.1f}' for total in needed)} |")
        say(lines[-1])
    return "\n".join(lines)


def main(words: list[str]) -> None:
    memory.trace_step = remembered(memory.trace_step)
    for path in sorted(CONFIGS.glob("*.yaml")):
        keys = yaml.safe_load(path.read_text())
        if "max_seq_length" in keys and "model_name_or_path" in keys and (not words or path.stem in words):
            write_header(path)
    if not words or "table" in words:
        text = PERFORMANCE.read_text()
        found = re.search(r"^\| model \| full, ZeRO-2.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
        assert found is not None
        PERFORMANCE.write_text(text.replace(found[0], table()))


if __name__ == "__main__":
    main(sys.argv[1:])

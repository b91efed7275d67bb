"""Shared by tests of complete runs: preferences about coloured squares, a short training, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from tests import preloaded

ROOT = Path(__file__).resolve().parents[1]
COLOURS = ("red", "green", "blue", "yellow", "black", "white")

# Two preference pairs a step, five steps, everything deterministic and nothing reported.
SHORT = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_tokens_per_batch": None,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "max_steps": 5,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": 100,
    "disable_tqdm": True,
}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def square(folder: Path, number: int) -> str:
    """Write a PNG of one colour and return its name; sizes differ, so that batches are ragged."""
    colour = COLOURS[number % len(COLOURS)]
    image = Image.new("RGB", (56 + 28 * (number % 3), 56), colour)
    name = f"{number}_{colour}.png"
    image.save(folder / name)
    return name


def colour_pairs(folder: Path, count: int, **columns: Any) -> Path:
    """Write `count` rows that ask for a colour, answered right and wrong; `columns` are lists or one value for all."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        row = {
            "id": f"pair-{i}",
            "prompt": "Which colour is this?" if i % 2 else "What colour do you see in this picture?",
            "chosen": f"It is {COLOURS[i % 6]}.",
            "rejected": COLOURS[(i + 1 + i // 6) % 6] + (" I think" if i % 4 == 0 else ""),
            "images": [square(folder, i)],
        }
        rows.append(row | {name: value[i] if isinstance(value, list) else value for name, value in columns.items()})
    return write_rows(folder / "pairs.jsonl", rows)


def colour_lists(folder: Path, count: int) -> Path:
    """`count` ranked lists of two, three or four answers."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "id": f"list-{i}",
            "prompt": "Name the colour.",
            "responses": [COLOURS[i % 6], "a colour", "a shape", "nothing"][: 2 + i % 3],
            "scores": [3, 2, 1, 0][: 2 + i % 3],
            "images": [square(folder, i)],
        }
        for i in range(count)
    ]
    return write_rows(folder / "lists.jsonl", rows)


def judged_further(data: Path) -> dict[str, Any]:
    """Add ratings and critiques of answers to every other row of `data`, and return the keys that train by them."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows[::2]:
        count = len(row.get("responses", "ab"))
        row |= {"clarity": [1 + i % 5 for i in range(count)], "critique": ["It is clear.", None, "No.", "So."][:count]}
    write_rows(data, rows)
    return {"outputs": ["overall=preference", "clarity=rating 1-5"], "critique_weight": 0.3}


def text_pairs(folder: Path, count: int) -> Path:
    """`count` rows without any image."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": f"text-{i}", "prompt": f"What is {i} plus one?", "chosen": str(i + 1), "rejected": f"It is {i}."}
        for i in range(count)
    ]
    return write_rows(folder / "texts.jsonl", rows)


def words(**keys: Any) -> list[str]:
    """Return keys as command-line words; a list becomes several values of its key."""
    plain = {True: "true", False: "false", None: "null"}
    line: list[str] = []
    for name, value in keys.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        line += [f"--{name}", *(plain[v] if v is None or isinstance(v, bool) else str(v) for v in values)]
    return line


def short_training(model: Path, data: Path | Sequence[Path], output: Path, **keys: Any) -> list[str]:
    """Return the words of `SHORT`, changed by `keys`."""
    return words(**{"model_name_or_path": model, "dataset_path": data, "output_dir": output, **SHORT, **keys})


def start(
    command: Sequence[str],
    *arguments: str,
    cwd: Path,
    processes: int = 1,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    """Start a script of the repository, under torchrun for several processes, in `cwd`."""
    script = [str(ROOT / command[0]), *command[1:]]
    launcher = [preloaded.python() if preexec_fn is None else sys.executable]  # a limit is of this process alone
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen(
        [*launcher, *script, *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # tests wait for lines
            "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions"),
            # DeepSpeed builds its CPU operator with the environment's own ninja.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        preexec_fn=preexec_fn,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0, timeout: float = 600) -> str:
    """Wait for a process that must end with `code`, and return its output."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, f"exit code {process.returncode} instead of {code}:\n{output}"
    return output


def train(*arguments: str, cwd: Path, processes: int = 1, code: int = 0) -> str:
    return finish(start(["train_rm.py"], *arguments, cwd=cwd, processes=processes), code)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint or adapter."""
    [file] = [folder / n for n in ("model.safetensors", "adapter_model.safetensors") if (folder / n).exists()]
    return load_file(file)


def assert_equal_weights(first: Path, second: Path) -> None:
    weights_a, weights_b = weights(first), weights(second)
    assert weights_a.keys() == weights_b.keys()
    different = [name for name in weights_a if not torch.equal(weights_a[name], weights_b[name])]
    assert not different, f"{len(different)} of {len(weights_a)} weights differ: {different[:3]}"


def largest_difference(first: Path, second: Path) -> float:
    weights_a, weights_b = weights(first), weights(second)
    assert weights_a.keys() == weights_b.keys()
    return max((weights_a[name] - weights_b[name]).abs().max().item() for name in weights_a)


def logged(checkpoint: Path, name: str) -> list[float]:
    """Return the values of `name` in the training log, in order."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]

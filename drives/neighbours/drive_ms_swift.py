"""ms-swift: the guide's command, and its plug-in through ms-swift's own import, GRPO scoring and advantages."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather
from checks import (
    ANSWERS,
    GUIDES_QUESTION,
    MANY,
    QUESTION,
    RANKS,
    Case,
    gdpo,
    guide,
    main,
    many_rewards,
    normalised,
    on_ranks,
    raised,
    ran,
    scored,
)
from swift.rl_core.advantage import compute_advantages
from swift.rl_core.data import GRPOSample
from swift.rl_core.grpo_algorithm import score_completions
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.utils import import_external_file

MORE = (*ANSWERS, "Red", "No.")
QUICK = (
    " --max_steps 2 --num_generations 2 --per_device_train_batch_size 2 --max_completion_length 6 --use_cpu true"
    " --torch_dtype float32 --tuner_type full --save_strategy no --report_to none --log_completions true"
    " --check_model false --custom_register_path tiny.py"
)
# Its template knows the picture's token by Qwen's number, and a tiny checkpoint has another.
TINY = """from swift.template.templates.qwen import Qwen2_5VLTemplate
Qwen2_5VLTemplate.image_token_id = {number}
"""


def of_guide(case: Case) -> dict[str, Any]:
    """The command with the default system turn; what it logs has the prompts as rendered."""
    number = json.loads(Path(case.policy, "config.json").read_text())["image_token_id"]
    files = {"plugin.py": plugin(case), "rows.jsonl": guide(case, '"messages"'), "tiny.py": TINY.format(number=number)}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = guide(case, "swift rlhf").rstrip() + QUICK
    subprocess.run(command, shell=True, check=True, env={**os.environ, "USE_HF": "1", "PATH": path})
    [log] = Path("output").rglob("completions.jsonl")
    rows = []
    for batch in map(json.loads, dict.fromkeys(log.read_text(encoding="utf-8").splitlines())):
        for prompt, answer, reward in zip(batch["prompt"], batch["completion"], batch["People"], strict=True):
            system = prompt.split("<|im_start|>system\n")[1].split("<|im_end|>")[0]
            row = scored(str(Path("cat.jpg").resolve()), answer, reward, GUIDES_QUESTION)
            rows.append({**row, "messages": [{"role": "system", "content": system}, *row["messages"]]})
    return ran("`swift rlhf`: 2 steps of GRPO with its system turn", rows)


def plugin(case: Case, model: str | None = None) -> str:
    """The guide's plug-in, with another expression for the model if there is one."""
    code = guide(case, "orms[")
    return code if model is None else "from breaks import BreaksOne\n" + code.replace(json.dumps(case.url), model)


def rewards(case: Case, rows: list[tuple[str, str]], plugin: str, names: Sequence[str]) -> torch.Tensor:
    """What ms-swift has of each reward of a plug-in, [N, functions]."""
    file = Path(tempfile.mkdtemp(dir=case.folder), f"plugin_{os.getpid()}_{time.monotonic_ns()}.py")
    file.write_text(plugin, encoding="utf-8")
    import_external_file(str(file))
    functions, _ = resolve_reward_funcs(list(names))
    samples = [
        GRPOSample.from_row({
            "messages": [
                {"role": "user", "content": f"<image>{QUESTION}"},
                {"role": "assistant", "content": answer},
            ],
            "images": [{"path": picture, "bytes": None}],
            "prompt_id": picture,
            "request_id": str(number),
        })
        for number, (picture, answer) in enumerate(rows)
    ]  # fmt: skip
    return score_completions(samples, functions, [None] * len(functions), False, torch.device("cpu"))


def equal(case: Case) -> list[dict[str, Any]]:
    rows = case.rows()
    values = rewards(case, rows, plugin(case), ("people",))[:, 0]
    return [scored(*row, value) for row, value in zip(rows, values, strict=True)]


def broken(case: Case) -> str:
    """A broken picture, and one sample that the service cannot score."""
    rows = [(case.pictures[0], answer) for answer in MORE]
    alone = rewards(case, rows, plugin(case), ("people",))[:, 0]
    for picture, model in ((case.broken, None), (case.pictures[0], f"BreaksOne({case.url!r})")):
        values = rewards(case, [rows[0], (picture, "Crimson"), *rows[1:]], plugin(case, model), ("people",))
        assert not values.isnan().any(), values
        assert torch.allclose(values[[0, 2, 3, 4], 0], alone, atol=1e-5), (values, alone)
        advantages, _ = compute_advantages(values, torch.ones(1), len(values))
        assert abs(advantages[1]) < 1e-3, (values, advantages)
    return "its group's mean: advantage 0"


def rank(number: int, case: Case) -> list[Any]:
    """Rewards and advantages of one picture's group, gathered of all ranks; then the last rank's second is broken."""
    Accelerator(cpu=True)
    group = [(case.pictures[0], answer) for answer in MORE]
    own = group[number * len(group) // RANKS : (number + 1) * len(group) // RANKS]
    found = []
    for model in (None, f"BreaksOne({case.url!r})" if number == RANKS - 1 else None):
        gathered = gather(rewards(case, own, plugin(case, model), ("people",)))
        advantages, _ = compute_advantages(gathered, torch.ones(1), len(group))
        found.append({"rewards": gathered[:, 0].tolist(), "advantages": advantages.tolist()})
    return found


@cache
def gathered(case: Case) -> list[Any]:
    return on_ranks(rank, case)[0]


def ranks(case: Case) -> list[dict[str, Any]]:
    whole, _ = gathered(case)
    expected = normalised(whole["rewards"], [0] * len(MORE), epsilon=1e-4)
    assert np.allclose(whole["advantages"], expected, atol=1e-4), (whole, expected)
    return [scored(case.pictures[0], *row) for row in zip(MORE, whole["rewards"], strict=True)]


def ranks_broken(case: Case) -> str:
    whole, missing = gathered(case)
    *others, last = missing["rewards"]
    assert np.allclose(others, whole["rewards"][:-1], atol=1e-5), (whole, missing)
    assert np.isclose(last, np.mean(others), atol=1e-5), missing
    assert abs(missing["advantages"][-1]) < 1e-3, missing
    return "a broken sample gets its group's mean: advantage 0"


def of_many(case: Case) -> list[dict[str, Any]]:
    """Each reward of a set as one of its own, as its GDPO takes them; of one a sample is missing."""
    rows = [(picture, answer) for picture in case.pictures for answer in MORE]
    many_rewards(case, "breaks.VlmRewardButOne", case.model)  # in place of the guide's rewards.yaml
    values = rewards(case, rows, plugin(case), [f"set_{name}" for name in MANY])
    advantages, _ = compute_advantages(values, torch.tensor(list(MANY.values())), len(MORE), scale_rewards="gdpo")
    columns = dict(zip(MANY, values.T.tolist(), strict=True))
    assert columns["brief"] == [float(len(answer) <= 12) for _, answer in rows], columns
    found = [scored(*row, value) for row, value in zip(rows, columns["people"], strict=True)]
    columns["people"][1] = math.nan
    expected = gdpo(columns, [picture for picture, _ in rows], epsilon=1e-8)
    assert np.allclose(advantages, expected, atol=1e-4), (advantages, expected)
    return [found[0], *found[2:]]


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.rows(), plugin(case, repr(case.away)), ("people",)), case.away)


if __name__ == "__main__":
    main(
        {
            "guide": of_guide,
            "equal": equal,
            "broken": broken,
            "away": away,
            "ranks": ranks,
            "ranks_broken": ranks_broken,
            "gdpo": of_many,
        }
    )

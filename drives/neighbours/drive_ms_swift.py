"""ms-swift: a plug-in's ORMs through its own import, GRPO scoring and advantages; nothing is generated."""

from __future__ import annotations

import math
import os
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
    MANY,
    QUESTION,
    RANKS,
    Case,
    gdpo,
    main,
    many_rewards,
    normalised,
    on_ranks,
    raised,
    scored,
)
from swift.rl_core.advantage import compute_advantages
from swift.rl_core.data import GRPOSample
from swift.rl_core.grpo_algorithm import score_completions
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.utils import import_external_file

MORE = (*ANSWERS, "Red", "No.")
PLUGIN = """
from swift.rewards import orms

from breaks import BreaksOne
from vlmrm.adapters.swift_orm import VlmrmORM


class People(VlmrmORM):
    model = {model}


orms["people"] = People
"""
MANY_PLUGIN = """
from swift.rewards import orms

from vlmrm.adapters.swift_orm import set_orms

orms.update(set_orms({file!r}))
"""


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
    values = rewards(case, rows, PLUGIN.format(model=repr(case.url)), ("people",))[:, 0]
    return [scored(*row, value) for row, value in zip(rows, values, strict=True)]


def broken(case: Case) -> str:
    """A broken picture, and one sample that the service cannot score."""
    rows = [(case.pictures[0], answer) for answer in MORE]
    alone = rewards(case, rows, PLUGIN.format(model=repr(case.url)), ("people",))[:, 0]
    for picture, model in ((case.broken, repr(case.url)), (case.pictures[0], f"BreaksOne({case.url!r})")):
        values = rewards(case, [rows[0], (picture, "Crimson"), *rows[1:]], PLUGIN.format(model=model), ("people",))
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
    for model in (repr(case.url), f"BreaksOne({case.url!r})" if number == RANKS - 1 else repr(case.url)):
        gathered = gather(rewards(case, own, PLUGIN.format(model=model), ("people",)))
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
    configuration = str(many_rewards(case, "breaks.VlmRewardButOne", case.model))
    values = rewards(case, rows, MANY_PLUGIN.format(file=configuration), tuple(MANY))
    advantages, _ = compute_advantages(values, torch.tensor(list(MANY.values())), len(MORE), scale_rewards="gdpo")
    columns = dict(zip(MANY, values.T.tolist(), strict=True))
    assert columns["brief"] == [float(len(answer) <= 12) for _, answer in rows], columns
    found = [scored(*row, value) for row, value in zip(rows, columns["people"], strict=True)]
    columns["people"][1] = math.nan
    expected = gdpo(columns, [picture for picture, _ in rows], epsilon=1e-8)
    assert np.allclose(advantages, expected, atol=1e-4), (advantages, expected)
    return [found[0], *found[2:]]


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.rows(), PLUGIN.format(model=repr(case.away)), ("people",)), case.away)


if __name__ == "__main__":
    main(
        {
            "equal": equal,
            "broken": broken,
            "away": away,
            "ranks": ranks,
            "ranks_broken": ranks_broken,
            "gdpo": of_many,
        }
    )

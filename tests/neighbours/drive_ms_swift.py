"""ms-swift: a plug-in's ORM and AsyncORM through its own import, GRPO scoring and advantages; nothing is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checks import ANSWERS, QUESTION, Case, main, raised, scored
from swift.rl_core.advantage import compute_advantages
from swift.rl_core.data import GRPOSample
from swift.rl_core.grpo_algorithm import score_completions
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.utils import import_external_file

PLUGIN = """
from swift.rewards import orms

from vlmrm.adapters.swift_orm import AsyncVlmrmORM, VlmrmORM


class People(VlmrmORM):
    model = {url!r}


class PeopleBeside(AsyncVlmrmORM):
    model = {url!r}


orms["people"], orms["people_beside"] = People, PeopleBeside
"""


def rewards(case: Case, rows: list[tuple[str, str]], url: str, names: tuple[str, ...]) -> torch.Tensor:
    """What ms-swift has of each reward, [N, functions]."""
    plugin = Path(case.folder, f"plugin_{len(list(Path(case.folder).iterdir()))}.py")
    plugin.write_text(PLUGIN.format(url=url), encoding="utf-8")
    import_external_file(str(plugin))
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
    both = rewards(case, rows, case.url, ("people", "people_beside"))
    return [scored(*row, value) for column in both.T for row, value in zip(rows, column, strict=True)]


def broken(case: Case) -> str:
    rows = [(case.pictures[0], answer) for answer in (*ANSWERS, "Red", "No.")]
    alone = rewards(case, rows, case.url, ("people",))[:, 0]
    rows.insert(1, (case.broken, "Red"))
    values = rewards(case, rows, case.url, ("people",))
    assert not values.isnan().any(), values
    assert torch.allclose(values[[0, 2, 3, 4], 0], alone, atol=1e-5), (values, alone)
    advantages, _ = compute_advantages(values, torch.ones(1), len(rows))
    assert abs(advantages[1]) < 1e-3, (values, advantages)
    return "its group's mean: advantage 0"


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.rows(), case.away, ("people",)), case.away)


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})

"""NeMo-RL: its rollouts ask the environment of examples/frameworks, a Ray actor that its registry begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from checks import QUESTION, Case, begin_ray, main, raised, recipe, scored
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.utils import ENV_REGISTRY, create_env
from nemo_rl.experience.rollouts import calculate_rewards


def rewards(case: Case, url: str, rows: Sequence[tuple[str, str]]) -> list[float]:
    """The rewards of a batch as its rollouts have them: texts rendered, and the row's own columns beside them."""
    ENV_REGISTRY.pop("people", None)  # that of another address
    os.environ["PYTHONPATH"] = os.pathsep.join([case.folder, os.environ["PYTHONPATH"]])  # of its actor
    recipe("nemo_rl_environment", url, case.folder)
    environment = create_env("people", {})
    batch = BatchedDataDict(
        message_log=[
            [
                {"role": "user", "content": f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"},
                {"role": "assistant", "content": answer},
            ]
            for _, answer in rows
        ],
        task_name=["people"] * len(rows),
        extra_env_info=[{"prompt": f"<image>{QUESTION}", "images": [picture]} for picture, _ in rows],
    )
    return calculate_rewards(batch, {"people": environment}).rewards.tolist()


def equal(case: Case) -> list[dict[str, Any]]:
    rows = case.rows()
    return [scored(*row, value) for row, value in zip(rows, rewards(case, case.url, rows), strict=True)]


def broken(case: Case) -> str:
    rows = [*case.rows()[:1], (case.broken, "It is red.")]
    return raised(lambda: rewards(case, case.url, rows), "RewardError", "sample 1")


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.away, case.rows()[:1]), "RewardError", case.away)


if __name__ == "__main__":
    begin_ray()
    main({"equal": equal, "broken": broken, "away": away})

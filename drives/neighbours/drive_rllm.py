"""rLLM: its engine runs its simple workflow with the function of examples/frameworks; what it generates is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from checks import QUESTION, Case, data_uri, main, raised, recipe, scored
from rllm.engine.rollout.rollout_engine import ModelOutput, RolloutEngine
from rllm.engine.unified_workflow_engine import UnifiedWorkflowEngine
from rllm.workflows.simple_workflow import SimpleWorkflow


class Given(RolloutEngine):
    """Says an answer where a model would generate one."""

    def __init__(self, answers: Sequence[str]):
        super().__init__()
        self.answers = answers

    async def get_model_response(self, messages: Any, *, application_id: str, **_: Any) -> ModelOutput:
        answer = self.answers[int(application_id.partition(":")[0])]
        return ModelOutput(text=answer, content=answer, reasoning="", finish_reason="stop")


def rewards(case: Case, url: str, rows: Sequence[tuple[str, str]]) -> list[float]:
    """The rewards of the episodes that its engine makes of the rows."""
    tasks = []
    for picture, _ in rows:
        shown = {"type": "image_url", "image_url": {"url": data_uri(picture)}}
        tasks.append({"messages": [{"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}]})

    async def run() -> list[Any]:
        engine = UnifiedWorkflowEngine(
            SimpleWorkflow,
            {"reward_function": recipe("rllm_function", url, case.folder).people},
            Given([answer for _, answer in rows]),
        )
        await engine.initialize_pool()
        return await engine.execute_tasks(tasks, task_ids=[str(number) for number in range(len(rows))])

    return [episode.trajectories[0].reward for episode in asyncio.run(run())]


def equal(case: Case) -> list[dict[str, Any]]:
    rows = case.rows()
    return [scored(*row, value) for row, value in zip(rows, rewards(case, case.url, rows), strict=True)]


def broken(case: Case) -> str:
    rows = [*case.rows()[:1], (case.broken, "It is red.")]
    return raised(lambda: rewards(case, case.url, rows), "[1:0] Rollout failed permanently after 3 attempts")


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.away, case.rows()[:1]), "Rollout failed permanently after 3 attempts")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})

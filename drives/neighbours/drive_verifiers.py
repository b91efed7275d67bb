"""verifiers, with the task of examples/frameworks, whose reward is a plain function of vlmrm."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers.v1 as vf
from checks import QUESTION, Case, data_uri, main, raised, recipe, scored
from verifiers.v1.types import AssistantMessage, ImageUrlContentPart, ImageUrlSource, TextContentPart, UserMessage


def task(url: str, folder: str) -> vf.Task[vf.TaskData]:
    return recipe("verifiers_task", url, folder).Picture(vf.TaskData(prompt=QUESTION))


def rollout(one: vf.Task[vf.TaskData], picture: str, answer: str) -> vf.Trace:
    """A trace of a question about a picture, as an agent leaves it."""
    image = data_uri(picture)
    question = [ImageUrlContentPart(image_url=ImageUrlSource(url=image)), TextContentPart(text=QUESTION)]
    nodes = [
        vf.MessageNode(message=UserMessage(content=question)),
        vf.MessageNode(message=AssistantMessage(content=answer), parent=0, sampled=True),
    ]
    agent = vf.AgentInfo(config=vf.AgentConfig())
    return vf.Trace(task=vf.TraceTask(type="Picture", data=one.data), agent=agent, nodes=nodes)


def reward(case: Case, url: str, picture: str, answer: str) -> float:
    one = task(url, case.folder)
    trace = rollout(one, picture, answer)
    asyncio.run(one.score(trace))
    return trace.reward


def equal(case: Case) -> list[dict[str, Any]]:
    return [scored(*row, reward(case, case.url, *row)) for row in case.rows()]


def broken(case: Case) -> str:
    return raised(lambda: reward(case, case.url, case.broken, "It is red."), "sample 0")


def away(case: Case) -> str:
    return raised(lambda: reward(case, case.away, *case.rows()[0]), "cannot be reached")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})

"""verifiers, whose environments prime-rl trains on: a task's reward is a plain function of vlmrm."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers.v1 as vf
from checks import QUESTION, Case, data_uri, main, raised, scored
from verifiers.v1.types import AssistantMessage, ImageUrlContentPart, ImageUrlSource, TextContentPart, UserMessage

from vlmrm.adapters.plain import Reward


def task(url: str) -> vf.Task[vf.TaskData]:
    people = Reward(url)

    class Picture(vf.Task[vf.TaskData]):
        @vf.reward
        async def people(self, trace: vf.Trace) -> float:
            *prompt, answer = [message.model_dump(exclude_none=True) for message in trace.messages]
            return (await asyncio.to_thread(people, [prompt], [answer["content"]]))[0]

    return Picture(vf.TaskData(prompt=QUESTION))


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


def reward(url: str, picture: str, answer: str) -> float:
    one = task(url)
    trace = rollout(one, picture, answer)
    asyncio.run(one.score(trace))
    return trace.reward


def equal(case: Case) -> list[dict[str, Any]]:
    return [scored(*row, reward(case.url, *row)) for row in case.rows()]


if __name__ == "__main__":
    main(
        {
            "equal": equal,
            "broken": lambda case: raised(lambda: reward(case.url, case.broken, "It is red."), "sample 0"),
            "away": lambda case: raised(lambda: reward(case.away, *case.rows()[0]), "cannot be reached"),
        }
    )

"""verifiers: a method of the task, which reads the conversation off the trace; prime-rl trains on such tasks."""

import asyncio

import verifiers.v1 as vf

from vlmrm.adapters.plain import Reward

people = Reward("http://host:8080")


class Picture(vf.Task[vf.TaskData]):
    @vf.reward
    async def people(self, trace: vf.Trace) -> float:
        *prompt, answer = [message.model_dump(exclude_none=True) for message in trace.messages]
        return (await asyncio.to_thread(people, [prompt], [answer["content"]]))[0]

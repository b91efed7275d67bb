"""`TurnScheduler`: one request goes on in each round of the event loop, in the order of arrival."""

from __future__ import annotations

import asyncio

from services import in_loop

from vlmrm.serving.event_loop import TurnScheduler


@in_loop
async def test_one_goes_on_in_each_round():
    turns, gone_on = TurnScheduler(), []

    async def work(number):
        await turns.next_turn()
        gone_on.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(8)]
    before = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        assert len(gone_on) <= before + 1
        before = len(gone_on)
    assert gone_on == list(range(8))
    await work("later")  # after there was no line


@in_loop
async def test_one_that_has_gone_holds_nobody_up():
    turns = TurnScheduler()
    first, second, third = (asyncio.create_task(turns.next_turn()) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await third
    assert first.cancelled() and second.cancelled()

"""Sockets between the processes of the service, over which each asks the other: packed messages, without pickle."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from vlmrm.errors import VlmrmError
from vlmrm.formats.wire import read_outcome, write_outcome
from vlmrm.serving.backend import Job, State, Status
from vlmrm.serving.clients import current_request
from vlmrm.serving.errors import InternalError, read_error, write_error
from vlmrm.serving.worker.channel import LENGTHS, pack, unpack

logger = logging.getLogger("vlmrm")


class LinkLost(Exception):
    """The other process has ended, and answers no more."""


class Link(asyncio.Protocol):
    """One end: `answer` returns what the other asks for, and `told` gets what needs no answer.

    Who stops waiting for an answer cancels it there. `lost` is done at the end, with what ended it.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Awaitable[Any]] | None = None,
        told: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._answer, self._told = answer, told
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._data, self._needed = bytearray(), LENGTHS.size
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def ask(self, message: dict[str, Any]) -> asyncio.Future[Any]:
        """Return the answer of the other end, or its error, or LinkLost."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        answer.add_done_callback(partial(self._is_over, number))
        if self.lost.done():
            answer.set_exception(LinkLost())
        else:
            self.tell({**message, "ask": number})
        return answer

    def _is_over(self, number: int, answer: asyncio.Future[Any]) -> None:
        del self._asked[number]
        if answer.cancelled() and not self.lost.done():
            self.tell({"drop": number})

    def tell(self, message: dict[str, Any]) -> None:
        self._transport.write(pack(message))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by their class

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():  # else who waited for it was cancelled
            self.lost.set_result(exc)
        for task in self._answering.values():
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(LinkLost())

    def data_received(self, data: bytes) -> None:
        self._data += data
        begin = 0
        while len(self._data) - begin >= self._needed:
            if self._needed == LENGTHS.size:
                self._needed += sum(LENGTHS.unpack_from(self._data, begin))
                continue
            end = begin + self._needed
            message = unpack(memoryview(self._data)[begin:end])
            begin, self._needed = end, LENGTHS.size
            self._receive(message)
        if begin:
            self._data = self._data[begin:]

    def _receive(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            number = message.pop("ask")
            self._answering[number] = asyncio.create_task(self._reply(number, message))
        elif "drop" in message:
            if (task := self._answering.get(message["drop"])) is not None:
                task.cancel()
        elif "reply" not in message:
            assert self._told is not None
            self._told(message)
        elif (answer := self._asked.get(message["reply"])) is not None and not answer.done():
            if "error" in message:
                answer.set_exception(read_error(message["error"]))
            else:
                answer.set_result(message["result"])

    async def _reply(self, number: int, message: dict[str, Any]) -> None:
        assert self._answer is not None
        try:
            reply = {"result": await self._answer(message)}
        except VlmrmError as error:
            reply = {"error": write_error(error)}
        except Exception:
            logger.exception("a request broke the service", extra={"fields": {"request_id": current_request().id}})
            reply = {"error": write_error(InternalError("the service failed: its log says more of this id."))}
        finally:
            del self._answering[number]
        self.tell({"reply": number, **reply})


def write_job(job: Job) -> dict[str, Any]:
    return {"key": job.key, **vars(job)}  # which a handler has computed


def read_job(content: dict[str, Any]) -> Job:
    key = content.pop("key")
    job = Job(**content)
    job.key = key
    return job


def write_status(status: Status) -> dict[str, Any]:
    outcomes = None if status.outcomes is None else list(map(write_outcome, status.outcomes))
    return {**vars(status), "state": status.state.value, "outcomes": outcomes}


def read_status(content: dict[str, Any]) -> Status:
    outcomes = None if content["outcomes"] is None else list(map(read_outcome, content["outcomes"]))
    content = {**content, "state": State(content["state"]), "outcomes": outcomes}
    return Status(**content)

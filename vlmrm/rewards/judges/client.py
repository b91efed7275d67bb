"""A client of one judge's server: bounded, patient where that helps, and quick to give up where it does not."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from pydantic import SecretStr

from vlmrm.errors import RewardError
from vlmrm.http import Server, Unavailable, request_to, retry_after, shortened
from vlmrm.rewards.judges.cache import ReplyCache
from vlmrm.rewards.judges.circuit import Circuit
from vlmrm.rewards.judges.loop import run
from vlmrm.rewards.judges.replies import Question, Reply, read_completion
from vlmrm.rewards.judges.retrying import Refused, failed_call, wait
from vlmrm.rewards.judges.settings import NO_KEY, JudgeSettings
from vlmrm.rewards.judges.usage import Usage

logger = logging.getLogger("vlmrm")


class JudgeClient:
    """Asks the server of `settings`; any number of threads may use it at a time.

    Args:
        sleep, clock, jitter: time and chance, for tests; the deadline's own clock is the event loop's.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ):
        self.settings = settings
        self.sleep, self.clock, self.jitter = sleep, clock, jitter
        self.cache = ReplyCache(settings.max_cache_size, settings.cache_dir)
        self.usage = Usage(settings.prompt_price, settings.completion_price)
        self.circuit = Circuit(settings.breaker_failures, settings.breaker_seconds, clock)
        self.slots = asyncio.Semaphore(settings.max_concurrent)
        self.takes_structure = True  # until the server refuses it
        self.answering = True  # as far as the log has been told
        self._key = SecretStr(settings.key())
        server = Server(settings.api_base_url, "api_base_url", self._key.get_secret_value())
        self._http = server.async_client(settings.timeout, settings.max_concurrent)

    def ask(self, questions: Sequence[Question]) -> list[Reply | RewardError]:
        """A reply to each question, in order, or why there is none. Equal questions are asked once.

        A reply is only found again when it was handed to `keep`. Where replies are sampled, at a temperature above 0,
        each question is asked, whatever was replied to its equals.
        """
        if self.settings.temperature > 0:
            return run(self._ask_all(questions))
        answers: dict[str, Reply | RewardError] = {}
        missing: dict[str, Question] = {}
        for question in questions:
            reply = self.cache.get(question.key)
            if reply is None:
                missing[question.key] = question
            else:
                answers[question.key] = reply
                self.usage.add(cache_hits=1)
        if missing:
            answers |= zip(missing, run(self._ask_all(list(missing.values()))), strict=True)
        return [answers[question.key] for question in questions]

    def keep(self, question: Question, reply: Reply) -> None:
        """Puts a reply that turned out to be of use into the cache, unless it is from there, or was sampled."""
        if self.settings.temperature == 0 and self.cache.get(question.key) is None:
            self.cache.put(question.key, reply)

    async def _ask_all(self, questions: Sequence[Question]) -> list[Reply | RewardError]:
        return await asyncio.gather(*map(self._ask, questions))

    async def _ask(self, question: Question) -> Reply | RewardError:
        async with self.slots:
            try:
                return await self._through_circuit(question)
            except RewardError as error:
                self.usage.add(failures=1)
                server = f"the judge {self.settings.vlm_model} at {self.settings.api_base_url}"
                return RewardError(f"{server}: {error}")

    async def _through_circuit(self, question: Question) -> Reply:
        probe = await self.circuit.enter()
        try:
            reply = await self._within_deadline(question, tries=1 if probe else 1 + self.settings.max_retries)
        except Refused:
            self.circuit.passed()
            raise
        except RewardError as error:
            self.circuit.failed(str(error))
            raise
        except BaseException:
            self.circuit.abandoned()
            raise
        self.circuit.passed()
        return reply

    async def _within_deadline(self, question: Question, tries: int) -> Reply:
        try:
            return await asyncio.wait_for(self._try(question, tries), self.settings.deadline)
        except TimeoutError:
            raise RewardError(f"there was no answer within the deadline of {self.settings.deadline:g} s") from None

    async def _try(self, question: Question, tries: int) -> Reply:
        end = self.clock() + self.settings.deadline
        for number in range(1, tries + 1):
            try:
                if number > 1:
                    self.usage.add(retries=1)
                reply = await self._call(question)
                self.answering = True
                return reply
            except Unavailable as error:
                if number == tries:
                    raise
                pause = wait(error, number, self.jitter())
                if self.clock() + pause > end:
                    raise RewardError(
                        f"{error}; waiting {pause:.0f} s for another try would pass the deadline of "
                        f"{self.settings.deadline:g} s"
                    ) from error
                if self.answering:  # one line, however many items find out
                    self.answering = False
                    said = "the judge %s at %s: %s; asking again, up to %d times an item"
                    logger.warning(said, self.settings.vlm_model, self.settings.api_base_url, error, tries - 1)
                await self.sleep(pause)
        raise AssertionError("there is always a last try")

    async def _call(self, question: Question) -> Reply:
        """One call; where the server refuses `response_format`, another one without it."""
        if not question.structured:
            return await self._post(question)
        refusal = None
        if self.takes_structure:
            try:
                return await self._post(question)
            except Refused as error:
                refusal = error
        reply = await self._post(question.unstructured())
        if self.takes_structure:
            self.takes_structure = False
            said = "the judge %s does not take response_format (%s); its replies are read as text from now on"
            logger.warning(said, self.settings.vlm_model, refusal)
        return reply

    async def _post(self, question: Question) -> Reply:
        """One HTTP request.

        Raises:
            Unavailable: when another one can help.
            Refused: when the server does not take this question.
            RewardError: when it takes none, or answers what is no completion.
        """
        self.usage.add(calls=1)
        with request_to("it", Unavailable(f"it did not answer within {self.settings.timeout:g} s")):
            answer = await self._http.post(
                "/chat/completions", content=question.content, headers={"Content-Type": "application/json"}
            )
        text = self._redacted(answer.text)
        if not answer.is_success:
            raise failed_call(answer.status_code, shortened(text), retry_after(answer.headers.get("Retry-After")))
        reply = read_completion(text)
        self.usage.add(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return reply

    def _redacted(self, text: str) -> str:
        """A server may send back the key that it was sent."""
        key = self._key.get_secret_value()
        return text if key == NO_KEY else text.replace(key, "<api key>")

"""Rewards that a vLLM server computes, such as a model that needs several GPUs at once.

    engine = "vlmrm.serving.upstream.VLLM"
    endpoint_url = "http://gpu-host:8000"
    model_path = "outputs/best"                    # what the server calls its model

Queue, protocols and transforms stay the service's; the server is sent conversations and returns raw logits. While it
is away, the reward is unavailable, and requests that were accepted wait.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlmrm.conversation import Conversation, Message
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.formats.flow_factory import PROMPT_SLOT, PromptTemplate
from vlmrm.formats.wire import Item, WireOutcome
from vlmrm.http import Refused, Server, Unavailable, read_json, retried, run
from vlmrm.scoring.remote import classify_body, read_classified
from vlmrm.scoring.transforms import sigmoid
from vlmrm.serving.media import conversation_of

PROBE = Conversation((Message.of("user", "2 + 2?"), Message.of("assistant", "4")))
ROUTE = "/classify"
UNREACHABLE_S = 10.0  # of retries while no connection is made


class VLLM:
    """A reward of a vLLM server, `vllm serve MODEL --runner pooling --convert classify`, with one label.

    `model_path` is the model's name there; `timeout` bounds one request, retries included.
    """

    def __init__(
        self,
        endpoint_url: str,
        endpoint_api_key: str = "",
        model_path: str = "",
        concurrency: int = 64,
        timeout: float = 120.0,
        custom_prompt: str = PROMPT_SLOT,
        system: Any = None,
    ):
        self.server = Server(endpoint_url, "endpoint_url", endpoint_api_key or None, connections=concurrency)
        self.model, self.timeout = model_path, timeout
        self.template = PromptTemplate(custom_prompt, system)
        self._threads = ThreadPoolExecutor(concurrency)
        self.info = {"kind": "conversations", "model": model_path or self.server.name, "server": "VLLM"}
        self._check()

    def __call__(self, items: Sequence[Item]) -> list[WireOutcome]:
        try:
            return list(self._threads.map(self._outcome, items))
        except Unavailable as error:
            # The service starts workers until one finds the server again; until then the reward is unavailable. Not
            # sys.exit, which would wait for the threads that still ask.
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(1)

    def _outcome(self, item: Item) -> WireOutcome:
        try:
            return {"score": self.score(conversation_of(item, self.template))}
        except Unavailable:
            raise
        except (RowError, RewardError) as error:
            return {"error": str(error)}

    def score(self, conversation: Conversation, **options: Any) -> float:
        """Return the raw logit, or what the server's `options` make of it."""
        body = classify_body(conversation, **({"model": self.model} if self.model else {}), **options)

        async def send(seconds: float) -> Any:
            return read_json(await self.server.call("POST", ROUTE, seconds, late=Unavailable, json=body))

        return read_classified(run(retried(send, seconds=self.timeout, unreachable=UNREACHABLE_S)), self.server.name)

    def _check(self) -> None:
        """Refuse a server that does not return raw logits: it would do as if it did."""
        try:
            raw = self.score(PROBE)
            activated = self.score(PROBE, use_activation=True)
        except Refused as error:
            raise ConfigError(f"{error}: give a server of a reward model with one label.") from None
        if not math.isclose(activated, sigmoid([raw])[0], abs_tol=1e-2):
            raise ConfigError(
                f"{self.server.name} returns {raw:g} as the raw score and {activated:g} with use_activation, which is "
                "not its sigmoid: use a vLLM that knows use_activation, and a model with one label."
            )

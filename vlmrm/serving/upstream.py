"""Rewards that a vLLM or SGLang server computes, such as a model that needs several GPUs at once.

    engine = "vlmrm.serving.upstream.VLLM"
    endpoint_url = "http://gpu-host:8000"
    model_path = "outputs/best"                    # what the server calls its model

Queue, protocols and transforms stay the service's; the server is sent conversations and returns raw logits. While it
is away, the reward is unavailable, and requests that were accepted wait.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlmrm.conversation import Conversation, Message, Text
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.formats.flow_factory import PROMPT_SLOT, PromptTemplate
from vlmrm.formats.wire import Item, WireOutcome
from vlmrm.http import Refused, Server, Unavailable, read_json, retried, run
from vlmrm.scoring.remote import classify_body, image_uri
from vlmrm.scoring.transforms import sigmoid
from vlmrm.serving.media import conversation_of

PROBE = Conversation((Message.of("user", "2 + 2?"), Message.of("assistant", "4")))
UNREACHABLE_S = 10.0  # of retries while no connection is made


class VLLM:
    """A reward of a vLLM server, `vllm serve MODEL --runner pooling --convert classify`, with one label.

    `model_path` is the model's name there; `timeout` bounds one request, retries included.
    """

    route = "/classify"

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
        self.info = {"kind": "conversations", "model": model_path or self.server.name, "server": type(self).__name__}
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

    def score(self, conversation: Conversation) -> float:
        return self._number(self._ask(self.body(conversation)))

    def body(self, conversation: Conversation, **options: Any) -> dict[str, Any]:
        return classify_body(conversation, **({"model": self.model} if self.model else {}), **options)

    def read(self, answer: Any) -> list[Any]:
        [row] = answer["data"]
        return row["probs"]

    def _number(self, answer: Any) -> float:
        try:
            [number] = self.read(answer)
            if math.isfinite(number):
                return float(number)
        except (KeyError, TypeError, ValueError, IndexError):
            pass
        raise RewardError(f"{self.server.name}{self.route} did not answer with one number: {json.dumps(answer)[:200]}")

    def _ask(self, body: Mapping[str, Any]) -> Any:
        async def send(seconds: float) -> Any:
            return read_json(await self.server.call("POST", self.route, seconds, late=Unavailable, json=body))

        return run(retried(send, seconds=self.timeout, unreachable=UNREACHABLE_S))

    def _check(self) -> None:
        """Refuse a server that does not return raw logits: it would do as if it did."""
        try:
            raw = self.score(PROBE)
            activated = self._number(self._ask(self.body(PROBE, use_activation=True)))
        except Refused as error:
            raise ConfigError(f"{error}: give a server of a reward model with one label.") from None
        if not math.isclose(activated, sigmoid([raw])[0], abs_tol=1e-2):
            raise ConfigError(
                f"{self.server.name} returns {raw:g} as the raw score and {activated:g} with use_activation, which is "
                "not its sigmoid: use a vLLM that knows use_activation, and a model with one label."
            )


class SGLang(VLLM):
    """A reward of an SGLang server, `--is-embedding`; the chat template of the checkpoint `model_path` renders."""

    def __init__(self, endpoint_url: str, model_path: str, **options: Any):
        from vlmrm.modeling import load_processor
        from vlmrm.rendering import Renderer

        self._renderer = Renderer(load_processor(model_path))
        super().__init__(endpoint_url, model_path=model_path, **options)

    def body(self, conversation: Conversation, **options: Any) -> dict[str, Any]:
        parts = [part for message in conversation.messages for part in message.content]
        pictures = [image_uri(part) for part in parts if not isinstance(part, Text)]
        return {"text": self._renderer.text(conversation.messages), **({"image_data": pictures} if pictures else {})}

    def read(self, answer: Any) -> list[Any]:
        return answer["embedding"]

    def _check(self) -> None:
        self.score(PROBE)

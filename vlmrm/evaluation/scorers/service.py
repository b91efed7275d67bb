"""`http://...`: a reward service: vlmrm's own, vLLM's `/classify` and `/score`, or OpenRLHF's `/get_reward`.

The last part of the path names the protocol; without one of these it is `vlmrm serve`'s `/v1/rewards`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlmrm.conversation import Conversation
from vlmrm.errors import CheckpointError, ConfigError, RewardError, RowError
from vlmrm.evaluation.entry import Entry, OpenEntry, Spec, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import Compared, ConversationScorer, compared, origin_of
from vlmrm.formats.texts import write_text
from vlmrm.http import Refused, Server, read_json, run
from vlmrm.rewards.remote import Endpoints, json_content
from vlmrm.scoring.remote import RemoteScorer, chat_content, classify_body
from vlmrm.settings import did_you_mean

ROUTES = ("classify", "score", "get_reward")
OPTIONS = ("model", "token_env", "timeout", "concurrency")
TIMEOUT = 600.0


class ServiceEntry(Entry):
    """A service by its address.

    Options: `model`, the reward's or the model's name on the server; `token_env`, the environment variable with the
    token (VLMRM_TOKEN for `vlmrm serve`); `timeout` in seconds for a request; `concurrency`, requests at a time.
    """

    def __init__(self, spec: Spec):
        spec.take(OPTIONS)
        options = spec.typed()
        self.model_name = None if "model" not in options else str(options["model"])
        self.timeout, self.concurrency = options.get("timeout", TIMEOUT), options.get("concurrency", 8)
        for name, value in {"timeout": self.timeout, "concurrency": self.concurrency}.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"scorer {spec.text}: {name} is {value!r}: it must be a number above 0.")
        variable = options.get("token_env", "VLMRM_TOKEN")
        self.token = os.environ.get(str(variable))
        if self.token is None and "token_env" in options:
            raise ConfigError(
                f"scorer {spec.text}: there is no environment variable {variable}: export the token in it."
            )
        base, _, last = spec.body.rstrip("/").rpartition("/")
        self.route = last if last in ROUTES else None
        self.url = base if self.route else spec.body
        self.address = Server(self.url, "scorer", self.token)
        super().__init__(self.address.name, (self.route or "rewards") + spec.suffix, spec.text)

    def info(self) -> dict[str, Any]:
        """Return what `vlmrm serve` says about the reward."""
        where = f"{self.address.name}/v1/models"
        try:
            data = read_json(run(self.address.call("GET", "/v1/models", 10.0)))["data"]
            served = {str(info["id"]): info for info in data}
        except (RewardError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, RewardError) else f"{where} is none of a vlmrm service"
            raise CheckpointError(
                f"{reason}: start vlmrm serve, or name one of {', '.join(ROUTES)} in the path."
            ) from None
        if self.model_name is None and len(served) == 1:
            return next(iter(served.values()))
        if self.model_name not in served:
            choose = f": add ?model=NAME with one of {', '.join(served) or 'none'}."
            hint = did_you_mean(self.model_name, served, choose) if self.model_name else choose
            raise CheckpointError(f"{self.address.name} has no reward {self.model_name or 'by default'}{hint}")
        return served[self.model_name]

    def digest(self) -> str:
        """Return the digest of the address, and of the revision that `vlmrm serve` says it serves."""
        revision = None if self.route else self.info().get("revision")
        return hashlib.sha256(json.dumps([self.path, revision]).encode()).hexdigest()

    def open(self, run: SweepRun) -> OpenEntry:
        return _Service(self, run) if self.route is None else _OtherService(self, run)


class _Service(ConversationScorer):
    """`vlmrm serve`, by its own protocol; the answers of a comparison are one group."""

    def __init__(self, entry: ServiceEntry, run: SweepRun):
        self.entry, self.info = entry, entry.info()
        self.compares = self.info.get("kind") != "conversations"  # a reward may be one of groups
        super().__init__(entry.path, run)
        self.scorer = RemoteScorer(
            entry.url,
            model=entry.model_name,
            token=entry.token,
            timeout=float(entry.timeout),
            concurrency=int(entry.concurrency),
        )

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        return self.scorer.score_each(conversations)

    def score_groups(self, groups: Sequence[Sequence[Conversation]]) -> list[Compared | RowError]:
        return list(map(compared, self.scorer.score_each_group(groups)))

    def close(self) -> None:
        self.scorer.close()

    def origin(self) -> Origin:
        details = {"url": self.entry.address.name, "reward": str(self.info["id"])}
        details |= {name: str(self.info[name]) for name in ("model", "revision") if self.info.get(name)}
        return origin_of(self.entry.digest(), **details)


class _OtherService(ConversationScorer):
    """Another server, asked for one conversation a request."""

    def __init__(self, entry: ServiceEntry, run: SweepRun):
        # A query of OpenRLHF is a text; vLLM takes images as data URIs.
        self.sees = frozenset() if entry.route == "get_reward" else frozenset({"image"})
        super().__init__(entry.path, run)
        self.entry = entry
        self.servers = Endpoints([entry.url], timeout=float(entry.timeout), attempts=3, token=entry.token)

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        with ThreadPoolExecutor(int(self.entry.concurrency)) as threads:
            return list(threads.map(self._score, conversations))

    def _score(self, conversation: Conversation) -> float | RowError:
        body, read = _PROTOCOLS[str(self.entry.route)]
        model = {} if self.entry.model_name is None else {"model": self.entry.model_name}
        try:
            answer = self.servers.post(f"/{self.entry.route}", json_content(body(conversation) | model))
        except RowError as error:
            return error
        except Refused as error:
            return RowError(str(error))
        try:
            score = read(answer)
        except (LookupError, TypeError, ValueError):
            raise RewardError(f"{self.name} answered {json.dumps(answer)[:200]}, without a score.") from None
        if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
            raise RewardError(f"{self.name} answered {score!r} as a score.")
        return float(score)

    def origin(self) -> Origin:
        details = {"url": self.entry.address.name, "route": f"/{self.entry.route}"}
        details |= {"model": self.entry.model_name} if self.entry.model_name else {}
        return origin_of(self.entry.digest(), **details)


def _score(conversation: Conversation) -> dict[str, Any]:
    """Return a request for the score of a prompt of one turn and an answer."""
    if len(conversation.prompt) != 1:
        raise RowError(f"its prompt has {len(conversation.prompt)} turns, and /score takes one: use /classify")
    first, second = (chat_content(message) for message in (conversation.prompt[0], conversation.answer))
    sides = [side if isinstance(side, str) else {"content": side} for side in (first, second)]
    return {"text_1": sides[0], "text_2": sides[1], "use_activation": False}


def _one_class(answer: Any) -> float:
    [data] = answer["data"]
    if len(data["probs"]) != 1:
        raise RewardError(f"/classify answered {len(data['probs'])} classes, and a reward model has one.")
    return data["probs"][0]


_PROTOCOLS: dict[str, tuple[Callable[[Conversation], dict[str, Any]], Callable[[Any], Any]]] = {
    "classify": (classify_body, _one_class),
    "score": (_score, lambda answer: answer["data"][0]["score"]),
    "get_reward": (lambda conversation: {"query": [write_text(conversation)[0]]}, lambda answer: answer["rewards"][0]),
}

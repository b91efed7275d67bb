"""`http://...`: a reward service, vlmrm's own; `http://.../classify`: a classifier of vLLM."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlmrm.conversation import Conversation
from vlmrm.errors import CheckpointError, ConfigError, RewardError, RowError
from vlmrm.evaluation.entry import Entry, OpenEntry, Spec, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import Compared, ConversationScorer, compared, origin_of
from vlmrm.http import Refused, Server, read_json, run
from vlmrm.rewards.remote import Endpoints, json_content
from vlmrm.scoring.remote import RemoteScorer, classify_body, read_classified
from vlmrm.settings import did_you_mean

CLASSIFY = "/classify"
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
        body = spec.body.rstrip("/")
        self.classifies = body.endswith(CLASSIFY)
        self.url = body.removesuffix(CLASSIFY)
        self.address = Server(self.url, "scorer", self.token)
        super().__init__(self.address.name, ("classify" if self.classifies else "rewards") + spec.suffix, spec.text)

    def info(self) -> dict[str, Any]:
        """Return what `vlmrm serve` says about the reward."""
        where = f"{self.address.name}/v1/models"
        try:
            data = read_json(run(self.address.call("GET", "/v1/models", 10.0)))["data"]
            served = {str(info["id"]): info for info in data}
        except (RewardError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, RewardError) else f"{where} is none of a vlmrm service"
            raise CheckpointError(
                f"{reason}: start vlmrm serve, or end the address of a vLLM server with {CLASSIFY}."
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
        revision = None if self.classifies else self.info().get("revision")
        return hashlib.sha256(json.dumps([self.path, revision]).encode()).hexdigest()

    def open(self, run: SweepRun) -> OpenEntry:
        return _Classifier(self, run) if self.classifies else _Service(self, run)


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


class _Classifier(ConversationScorer):
    """vLLM's classifier with one label, asked for the logit of one conversation a request."""

    sees = frozenset({"image"})

    def __init__(self, entry: ServiceEntry, run: SweepRun):
        super().__init__(entry.path, run)
        self.entry = entry
        self.servers = Endpoints([entry.url], timeout=float(entry.timeout), attempts=3, token=entry.token)
        self.model = {} if entry.model_name is None else {"model": entry.model_name}

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        with ThreadPoolExecutor(int(self.entry.concurrency)) as threads:
            return list(threads.map(self._score, conversations))

    def _score(self, conversation: Conversation) -> float | RowError:
        try:
            answer = self.servers.post(CLASSIFY, json_content(classify_body(conversation, **self.model)))
        except RowError as error:
            return error
        except Refused as error:
            return RowError(str(error))
        return read_classified(answer, self.entry.address.name)

    def origin(self) -> Origin:
        return origin_of(self.entry.digest(), url=self.entry.address.name, route=CLASSIFY, **self.model)

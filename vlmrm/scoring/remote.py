"""A reward model behind an address as a scorer: what `vlmrm serve` serves, on this machine or another.

    scorer = load_scorer("http://host:8080")          # sends VLMRM_TOKEN where it is set
    scorer = RemoteScorer("https://host/rm", model="helpfulness", token=...)

It needs neither torch nor any extra.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

from cachetools import LRUCache
from PIL import Image

from vlmrm.conversation import Conversation, Message, Part, Reference, Text
from vlmrm.conversation import Image as ImagePart
from vlmrm.data.media import encoded_media, media_key, open_image, png_of
from vlmrm.errors import ConfigError, RewardError, RowError, finite_or_error
from vlmrm.formats.openai import read_conversation, write_messages
from vlmrm.http import Server, error_text, read_json, retried, run
from vlmrm.outputs import ONE
from vlmrm.scoring.protocol import ConversationLike, Group, all_scores, conversations_of, prefixes_of, regrouped

ROUTE = "/v1/rewards"
REVISION_HEADER = "X-Vlmrm-Revision"
UNREACHABLE_S = 30.0  # seconds of retries while no connection is made
LONGEST_S = 3600.0  # the longest timeout that a service accepts
CONCURRENCY = 8  # requests at a time
# A request is sent once it reaches any of these.
CHUNK_ITEMS = 64
CHUNK_BYTES = 16 * 2**20
CHUNK_FILES = 512
KEPT_BYTES = 256 * 2**20  # of encoded media
HEAD = "request"  # the form field that holds the JSON; the other fields are files


class AsyncRemoteScorer:
    """The methods of `Scorer` as coroutines, for one event loop. Close it with `aclose`, or use `async with`.

    A request is retried when there is no connection or a broken one, and after a status of 429, 502, 503 or 504, once
    the wait that the server asks for is over. The service computes equal requests once, so no work is done twice.

        async with AsyncRemoteScorer("http://host:8080") as scorer:
            scores = await scorer.score(conversations)

    Args:
        base_url: `http://[user:password@]host:port[/path]`.
        model: the name of the reward; may be left out where the service has one.
        token: default: the environment's VLMRM_TOKEN, where it is set.
        timeout: seconds for each request, retries included.
        revision: of the model that must have made the scores, as `digest` says it; where another is served, or is put
            in its place meanwhile, that is a RewardError. None takes any.
        concurrency: requests at a time; a long list of conversations becomes many requests.
        transport: of httpx2, for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        token: str | None = None,
        timeout: float = 600.0,
        revision: str | None = None,
        concurrency: int = CONCURRENCY,
        transport: Any = None,
    ):
        for name, value in {"timeout": timeout, "concurrency": concurrency}.items():
            if not value > 0:
                raise ConfigError(f"{name} is {value}: write a number above 0.")
        token = os.environ.get("VLMRM_TOKEN") if token is None else token
        self.server = Server(base_url, "base_url", token, connections=concurrency, transport=transport)
        self.model, self.timeout, self.concurrency = model, timeout, concurrency
        self._headers = {} if revision is None else {REVISION_HEADER: revision}
        self.digest: str | None = None  # the service's revision of the model, from its last answer

    async def score(self, conversations: Sequence[ConversationLike]) -> list[float]:
        """Return the raw logit of each conversation, in order; raise RowError with the index of one without.

        A service that fails is a RewardError, a wrong token or name of a reward a ConfigError.
        """
        return all_scores(await self.score_each(conversations))

    async def score_each(self, conversations: Sequence[ConversationLike]) -> list[float | RowError]:
        """Return the raw logit of each conversation, or the error of one that cannot be scored, in order."""
        return await scores_of([[it] for it in conversations], self._ask, self.concurrency)

    async def score_outputs(self, conversations: Sequence[ConversationLike]) -> list[dict[str, float] | RowError]:
        """Return the value of each output by name for each conversation, or the error of one that has none."""
        return await scores_of(
            [[it] for it in conversations], partial(self._ask, read=_read_outputs), self.concurrency
        )

    async def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the raw logit of each candidate of each (prompt, candidates); a group is one request."""
        conversations = conversations_of(groups)
        scores = await scores_of(conversations, self._ask, self.concurrency, grouped=True)
        return regrouped(all_scores(scores), conversations)

    async def score_each_group(self, groups: Sequence[Sequence[ConversationLike]]) -> list[list[float | RowError]]:
        """Return, for the answers of each prompt as conversations, the raw logit of each, or its error."""
        return regrouped(await scores_of(groups, self._ask, self.concurrency, grouped=True), groups)

    async def score_prefixes(self, task: Any, frames: Sequence[Reference]) -> list[float]:
        """Return the raw logit of each prefix of an episode, as `LocalScorer.score_prefixes` does.

        The prefixes are the answers of one group: a request that holds each frame once. Those of one batch of the
        service, whose budget counts each prefix in full, share the task and the frames.
        """
        [scores] = await self.score_each_group([prefixes_of(task, frames)])
        return all_scores(scores)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.server.aclose()

    async def __aenter__(self) -> AsyncRemoteScorer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _ask(self, chunk: Chunk, read: Callable[[Mapping[str, Any]], Any] | None = None) -> dict[int, Any]:
        async def send(seconds: float) -> Any:
            content = chunk.content(self.model, seconds)
            content["headers"] = {**content.get("headers", {}), **self._headers}
            answer = await self.server.call("POST", ROUTE, seconds, **content)
            _check_service(answer)
            return read_json(answer)

        answer = await retried(send, seconds=self.timeout, unreachable=UNREACHABLE_S)
        demanded = self._headers.get(REVISION_HEADER)
        if demanded is not None and answer.get("revision") != demanded:  # a server that does not know the header
            raise RewardError(f"{self.server.name} answered by revision {answer.get('revision')}, not {demanded}")
        scores = dict(zip(chunk.indices, read_scores(answer, len(chunk.indices), read), strict=True))
        self.digest = answer.get("revision")
        return scores


async def scores_of(
    groups: Sequence[Sequence[ConversationLike]],
    ask: Callable[[Chunk], Coroutine[Any, Any, dict[int, Any]]],
    concurrency: int = CONCURRENCY,
    *,
    grouped: bool = False,
) -> list[Any]:
    """Return the score of each conversation of all groups, or its error, by the answers of `ask` to requests.

    Requests are sent as others finish, so that a long list is not encoded all at once.
    """
    scores: dict[int, Any] = {}
    failures: dict[int, RowError] = {}
    requests = requests_of(groups, failures, grouped)
    asking: set[asyncio.Task[dict[int, Any]]] = set()
    try:
        # Encoding media takes long enough to stall the event loop, so it runs on a thread.
        while (chunk := await asyncio.to_thread(lambda: next(requests, None))) is not None:
            asking.add(asyncio.create_task(ask(chunk)))
            if len(asking) == concurrency:
                done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for part in await asyncio.gather(*done):
                    scores.update(part)
        for part in await asyncio.gather(*asking):
            scores.update(part)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    scores.update(failures)
    return [scores[index] for index in range(len(scores))]


def _check_service(answer: Any) -> None:
    """Raise ConfigError where the address, the token or the name of the reward is wrong."""
    status, where = answer.status_code, answer.url
    if status == 401:
        raise ConfigError(f"{where} refused the token: set VLMRM_TOKEN to the one that the service was started with.")
    if status == 404 and "reward" in error_text(answer):
        raise ConfigError(f"{where}: {error_text(answer)}")
    if status == 404 or answer.is_redirect:
        raise ConfigError(f"{where} answered {status}: give the address of a vlmrm service.")


class RemoteScorer:
    """A `Scorer` of a model on a server. Arguments and errors are those of `AsyncRemoteScorer`.

        RemoteScorer("http://host:8080", timeout=60).score(conversations)

    It may be called from several threads, pickled, and used after a fork: each process opens its own connections.
    """

    def __init__(self, base_url: str, **options: Any):
        self._asked = AsyncRemoteScorer(base_url, **options)
        self._made_of = base_url, options

    @property
    def digest(self) -> str | None:
        """Return the service's revision of the model that gave the last scores; None before the first."""
        return self._asked.digest

    def score(self, conversations: Sequence[ConversationLike]) -> list[float]:
        """Return the raw logit of each conversation, in order."""
        return run(self._asked.score(conversations))

    def score_each(self, conversations: Sequence[ConversationLike]) -> list[float | RowError]:
        """Return the raw logit of each conversation, or the error of one that cannot be scored, in order."""
        return run(self._asked.score_each(conversations))

    def score_outputs(self, conversations: Sequence[ConversationLike]) -> list[dict[str, float] | RowError]:
        """Return the value of each output by name for each conversation, or the error of one that has none."""
        return run(self._asked.score_outputs(conversations))

    def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the raw logit of each candidate of each (prompt, candidates); a group is one request."""
        return run(self._asked.score_groups(groups))

    def score_each_group(self, groups: Sequence[Sequence[ConversationLike]]) -> list[list[float | RowError]]:
        """Return, for the answers of each prompt as conversations, the raw logit of each, or its error."""
        return run(self._asked.score_each_group(groups))

    def score_prefixes(self, task: Any, frames: Sequence[Reference]) -> list[float]:
        """Return the raw logit of each prefix of an episode, [T]; an episode is one request."""
        return run(self._asked.score_prefixes(task, frames))

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        run(self._asked.aclose())

    def __enter__(self) -> RemoteScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteScorer({self._asked.server.name})"

    def __reduce__(self):
        base_url, options = self._made_of
        return partial(RemoteScorer, base_url, **options), ()


@dataclass
class Chunk:
    """One request: its items as JSON, the index of each among the conversations, and the media that they show."""

    indices: list[int] = field(default_factory=list)
    items: list[bytes] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # by what items call them: each once
    size: int = 0

    def add(self, index: int, item: bytes, files: Mapping[str, bytes]) -> None:
        self.indices.append(index)
        self.items.append(item)
        self.size += len(item) + sum(len(files[name]) for name in files.keys() - self.files.keys())
        self.files.update(files)

    def full(self) -> bool:
        return len(self.items) >= CHUNK_ITEMS or self.size >= CHUNK_BYTES or len(self.files) >= CHUNK_FILES

    def content(self, model: str | None, timeout: float) -> dict[str, Any]:
        """Return the keywords of an httpx2 request: JSON, or a form where there are files."""
        fields = json.dumps({"model": model, "timeout": min(timeout, LONGEST_S)})
        body = fields[:-1].encode() + b', "items": [' + b",".join(self.items) + b"]}"
        if not self.files:
            return {"content": body, "headers": {"Content-Type": "application/json"}}
        files = {name: (name, data, "application/octet-stream") for name, data in self.files.items()}
        return {"files": {HEAD: (None, body, "application/json"), **files}}


def requests_of(
    groups: Iterable[Sequence[ConversationLike]], failures: dict[int, RowError], grouped: bool
) -> Iterator[Chunk]:
    """Yield requests of about `CHUNK_ITEMS` conversations or `CHUNK_BYTES`, each made when it is asked for.

    A group is never split, as a reward may compare its answers. The error of a conversation that cannot be sent is put
    into `failures` under its index.
    """
    media = EncodedMedia()
    chunk, numbers = Chunk(), count()
    for group_id, group in enumerate(groups):
        for conversation, index in zip(group, numbers, strict=False):
            try:
                chunk.add(index, *_encode_item(conversation, media, str(group_id) if grouped else None))
            except RowError as error:
                failures[index] = error
        if chunk.full():
            yield chunk
            chunk = Chunk()
    if chunk.items:
        yield chunk


def read_scores(answer: Any, count: int, read: Callable[[Mapping[str, Any]], Any] | None = None) -> list[Any]:
    """Return what `read` makes of each of `count` items in a service's answer: its raw logit or its error."""
    data = answer.get("data") if isinstance(answer, dict) else None
    rows = data if isinstance(data, list) and all(isinstance(row, dict) for row in data) else []
    if [row.get("index") for row in rows] != list(range(count)):
        raise RewardError(f"the service answered {count} items with something else: is it a vlmrm service?")
    return [*map(read or _read_score, rows)]


def _read_score(row: Mapping[str, Any]) -> float | RowError:
    raw, error = row.get("raw"), row.get("error")
    if isinstance(error, str):
        return RowError(error)
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        raise RewardError(f"the service answered {raw!r} as the score of an item: is it a vlmrm service?")
    return finite_or_error(float(raw))


def _read_outputs(row: Mapping[str, Any]) -> dict[str, float] | RowError:
    """Return the values of an item by the name of the output; of a model of one number that as `score`."""
    score = _read_score(row)
    return score if isinstance(score, RowError) else (row.get("details") or {}).get("outputs", {ONE.names[0]: score})


class EncodedMedia:
    """A cache of images and videos as files, so that each is encoded once; least recently used ones are dropped."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self._files: LRUCache[str, bytes] = LRUCache(kept_bytes, getsizeof=len)

    def file(self, reference: Any, kind: str) -> tuple[str, bytes]:
        """Return a name, which is equal for equal content, and the content."""
        key = media_key(reference)
        data = self._files.get(key)
        if data is None:
            is_picture = isinstance(reference, Image.Image)
            data = png_of(open_image(reference)) if is_picture else encoded_media(reference, kind)
            with suppress(ValueError):  # larger than the cache
                self._files[key] = data
        return blake2b(key.encode(), digest_size=16).hexdigest(), data


def classify_body(conversation: Conversation, **options: Any) -> dict[str, Any]:
    """Return a request of vLLM's `/classify` for the raw logit of a conversation; by default it answers σ of it."""
    messages = [{"role": message.role, "content": _chat_content(message)} for message in conversation.messages]
    return {"messages": messages, "use_activation": False, "add_generation_prompt": False, **options}


def read_classified(answer: Any, server: str) -> float:
    """Return the number of a `/classify` answer's one class; raise RewardError, which names `server`, without one."""
    try:
        [row] = answer["data"]
        [number] = row["probs"]
        if not isinstance(number, bool) and math.isfinite(number):
            return float(number)
    except (LookupError, TypeError, ValueError):
        pass
    raise RewardError(f"{server}/classify did not answer with one number: {json.dumps(answer)[:200]}")


def _chat_content(message: Message) -> str | list[dict[str, Any]]:
    """Return a message's content as OpenAI's clients write it, images as data URIs."""
    if all(isinstance(part, Text) for part in message.content):
        return message.text
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "image_url", "image_url": {"url": _image_uri(part)}}
        for part in message.content
    ]


def _image_uri(part: Part) -> str:
    """Return an image as our models see it in a data URI; raise RowError for a video."""
    if not isinstance(part, ImagePart):
        raise RowError("a video cannot be handed to another server, which would look at other frames: send images")
    return f"data:image/png;base64,{base64.b64encode(png_of(open_image(part.reference))).decode()}"


def _encode_item(
    conversation: ConversationLike, media: EncodedMedia, group: str | None
) -> tuple[bytes, dict[str, bytes]]:
    """Return a conversation as JSON, and the files that it names."""
    files: dict[str, bytes] = {}

    def attached(reference: Reference, kind: str) -> Any:
        if isinstance(reference, str) and reference.startswith(("http://", "https://")):
            return reference  # the service fetches it
        if isinstance(reference, list):
            return [attached(frame, "image") for frame in reference]
        name, data = media.file(reference, kind)
        files[name] = data
        return f"attachment:{name}"

    turns = write_messages(read_conversation(conversation).messages)
    for part in (part for turn in turns for part in turn["content"]):
        if (kind := part["type"]) != "text":
            part[kind] = attached(part[kind], kind)
    try:
        return json.dumps({"messages": turns, "group": group}, allow_nan=False).encode(), files
    except (TypeError, ValueError) as error:
        raise RowError(f"it cannot be sent ({error})") from error

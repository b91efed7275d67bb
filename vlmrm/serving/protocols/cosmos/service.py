"""An enqueue as one job for each reward that it names, and a job's status as the answer to a pull."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from vlmrm.conversation import Outcome
from vlmrm.errors import MediaError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import State, Status
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.event_loop import in_thread
from vlmrm.serving.gateway import Gateway
from vlmrm.serving.protocols.cosmos.payload import MediaBatch, Metadata, read_media
from vlmrm.serving.service import NotServing
from vlmrm.serving.settings import RewardSettings
from vlmrm.serving.strict_json import parse_as
from vlmrm.serving.worker.channel import redact_paths

COLUMN = {"image": "image", "video": "video", "latent": "video"}  # what rewards see of each kind


class GenEvalRequest(TypedDict):
    """A request's GenEval task of each sample: its tag and clauses."""

    tags: list[str]
    includes: list[list[dict[str, Any]]]
    only_strict: bool


class RequestRecord(TypedDict):
    """The record of a request until it is pulled: the job of each reward, and further fields of its answer."""

    jobs: dict[str, str]
    input_info: dict[str, Any]
    geneval: GenEvalRequest | None


# Enqueue -------------------------------------------------------------------------------------------------------------


async def read_request(gateway: Gateway, body: bytes) -> tuple[Metadata, MediaBatch]:
    """Return the JSON and the media of an enqueue."""
    head, newline, data = body.partition(b"\n")
    if not newline:
        raise MediaError("the body has no line end after its JSON: send <JSON>, a line end, and the media")
    metadata = await parse_as(Metadata, head, gateway.settings.limits)
    if metadata.media_type == "latent":
        _check_decoder(gateway)
    media = await in_thread(read_media, data, metadata.media_type, gateway.settings.limits)
    if len(media.samples) != len(metadata.prompts):
        raise InvalidRequest(f"there are {len(metadata.prompts)} prompts but {len(media.samples)} samples of media.")
    return metadata, media


def _check_decoder(gateway: Gateway) -> None:
    health = gateway.service.decoder_health()
    if health is None:
        raise InvalidRequest(
            "this service has no decoder of latents: set [decode_args] model_path in its configuration, or send "
            "frames with media_type video."
        )
    if health.unavailable:
        raise NotServing("the decoder of latents cannot be loaded now: see /ready.")


async def enqueue(gateway: Gateway, rewards: Sequence[RewardSettings], metadata: Metadata, media: MediaBatch) -> str:
    """Accept the samples for all of the rewards, or for none, and return the id by which results are pulled."""
    for reward in rewards:
        _check_required(gateway, reward, metadata)
    items = {reward.name: await in_thread(_items, reward, metadata, media) for reward in rewards}
    jobs: dict[str, str] = {}
    try:
        for name in items:
            jobs[name] = await gateway.service.submit(name, items[name])
    except BaseException:  # all or nothing, also when the client disconnects meanwhile
        for job_id in jobs.values():
            await gateway.service.backend.cancel(job_id)
        raise
    tags, includes, strict = metadata.geneval_tags, metadata.geneval_includes, metadata.geneval_only_strict
    geneval: GenEvalRequest | None = None
    if tags is not None and includes is not None:
        geneval = {"tags": tags, "includes": includes, "only_strict": strict}
    info = media.info if media.kind == "image" else {**media.info, "video_infos": metadata.video_infos}
    request_id = str(uuid.uuid4())
    await _save(gateway, request_id, {"jobs": jobs, "input_info": info, "geneval": geneval})
    return request_id


def _check_required(gateway: Gateway, reward: RewardSettings, metadata: Metadata) -> None:
    """Check that a reward gets what it needs; before a worker has loaded, only its job can fail for want of it."""
    if reward.reward_type == "unified_reward" and metadata.media_type != "image":
        raise InvalidRequest(f"the reward {reward.name} is of images here: its scores of videos have another scale.")
    sent = {"prompt", COLUMN[metadata.media_type]}
    if metadata.geneval_tags is not None:
        sent.add("metadata")
    for column in gateway.service.info(reward.name).get("required", ()):
        if column not in sent:
            name = "geneval_tags and geneval_includes" if column == "metadata" else column
            raise InvalidRequest(f"the reward {reward.name} needs {name}, which the request does not have.")


def _items(reward: RewardSettings, metadata: Metadata, media: MediaBatch) -> list[Item]:
    """Return the samples as a reward's worker takes them, with the samples of one prompt in one group."""
    items: list[Item] = []
    for index, prompt in enumerate(metadata.prompts):
        item: Item = {"prompt": prompt, **media.columns[index], "group": prompt}
        if media.kind != "image":
            item["fps"] = (metadata.video_infos or [])[index]["video_fps"]
        if reward.engine:  # a handler is called with all samples of a request, and all that it says
            item |= {"group": "request", "request": metadata.model_dump(exclude={"prompts", "reward_fn"})}
        if reward.reward_type == "gen_eval" and metadata.geneval_tags and metadata.geneval_includes:
            item["metadata"] = {"tag": metadata.geneval_tags[index], "include": metadata.geneval_includes[index]}
        items.append(item)
    return items


# Pull ----------------------------------------------------------------------------------------------------------------


async def pull(gateway: Gateway, request_id: str, name: str | None, patience: float) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the answer about one reward of a request, after `patience` seconds at most.

    425 makes every client retry; a permanent error is a 200 without scores, so that no client retries for an hour.
    """
    kept: Any = await gateway.service.backend.load_record(_key(request_id))
    if kept is None:
        return 400, _missing(request_id, "unknown")
    record: RequestRecord = kept
    jobs = record["jobs"]
    if name is None and len(jobs) == 1:
        [name] = jobs
    if name is None or name not in jobs:
        return 400, _missing(request_id, "unknown", f": it was asked for {', '.join(jobs)}: name one of them as type")
    await _save(gateway, request_id, record)  # for another `result_ttl`
    status = await gateway.service.wait(name, jobs[name], patience)
    await gateway.scheduler.next_turn(scored=True)
    if status is not None and not status.finished:
        return 425, _missing(request_id, status.state.value)
    if status is not None:
        gateway.note_revision(name, status)
    return 200, _answer(gateway.service.reward(name), status, record)


def _missing(request_id: str, state: str, reason: str = "") -> dict[str, Any]:
    return {"message": f"Not found scores for {request_id}{reason}", "state": state}


async def _save(gateway: Gateway, request_id: str, record: RequestRecord) -> None:
    """Keep the record for as long as results are kept."""
    await gateway.service.backend.save_record(_key(request_id), dict(record), gateway.settings.limits.result_ttl)


def _key(request_id: str) -> str:
    return f"cosmos:{request_id}"


def _answer(reward: RewardSettings, status: Status | None, record: RequestRecord) -> dict[str, Any]:
    """Return cosmos-rl's documented result; `scores` is null where `error` is set."""
    outcomes = (status.outcomes if status is not None else None) or []
    decoded = sum(outcome.decode_seconds for outcome in outcomes)
    answer = {
        "scores": None,
        "input_info": record["input_info"],
        "duration": f"{(status.seconds if status is not None else None) or 0.0:.2f}",
        "decoded_duration": f"{decoded:.2f}",
        "type": reward.name,
    }
    error = _error(status, outcomes)
    if error is None:
        return {**answer, "scores": cosmos_scores(reward, outcomes, record["geneval"])}
    state = State.expired if status is None else State.failed
    return {"error": redact_paths(error), **answer, "state": state.value}


def _error(status: Status | None, outcomes: Sequence[Outcome]) -> str | None:
    if status is None:
        return "its result is no longer kept: send it again."
    if status.state is not State.done:
        return f"it could not be computed: {status.error}."
    errors = [f"sample {n}: {outcome.error}" for n, outcome in enumerate(outcomes) if outcome.error is not None]
    if not errors:
        return None
    return errors[0] + (f" (and {len(errors) - 1} more)." if errors[1:] else ".")


# Scores --------------------------------------------------------------------------------------------------------------

Scores: TypeAlias = Mapping[str, Any]  # a value for each sample under the reward's own keys, nested or not
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # of GenEval
OTHER_TASK = -10.0  # in gen_eval_group, for samples of another task


def cosmos_scores(reward: RewardSettings, outcomes: Sequence[Outcome], geneval: GenEvalRequest | None) -> Scores:
    """Return the scores of all samples under the keys that cosmos-rl's clients read, lists of one value a sample."""
    if reward.engine and all("scores" in outcome.extra for outcome in outcomes):  # a handler's own keys
        return _stack([outcome.extra["scores"] for outcome in outcomes])
    if reward.reward_type == "gen_eval" and geneval is not None:
        return _geneval_scores(outcomes, geneval)
    keys = KEYS.get(reward.reward_type) or {reward.name: _score}
    return {key: [read(outcome) for outcome in outcomes] for key, read in keys.items()}


def _stack(scores: Sequence[Scores]) -> Scores:
    """Return the scores of single samples as lists over all, nested scores too."""
    return {
        key: _stack([sample[key] for sample in scores])
        if isinstance(value, dict)
        else [sample[key] for sample in scores]
        for key, value in scores[0].items()
    }


def _score(outcome: Outcome) -> float:
    assert outcome.score is not None  # a request with an error has no scores
    return outcome.score


def _prediction(outcome: Outcome) -> str:
    return "Bad" if outcome.extra["logits"]["yes"] > outcome.extra["logits"]["no"] else "Good"


# As cosmos-rl's own handlers of these rewards call them.
KEYS: dict[str, dict[str, Callable[[Outcome], Any]]] = {
    "cosmos_reason1": {
        "prediction": _prediction,
        "no_score": _score,
        "yes_logit": lambda outcome: outcome.extra["logits"]["yes"],
        "no_logit": lambda outcome: outcome.extra["logits"]["no"],
    },
    "dance_grpo": {
        "vq_reward": lambda outcome: outcome.extra["VQ"],
        "mq_reward": lambda outcome: outcome.extra["MQ"],
        "ta_reward": lambda outcome: outcome.extra["TA"],
        "overall_reward": lambda outcome: outcome.extra["overall"],
    },
    "hpsv2": {"hpsv2": _score},
    "pickscore": {"pickscore": _score},
    "hpsv3": {"hpsv3": _score},
    "image_reward": {"image_reward": _score},
    "ocr": {"ocr_reward": _score},
    "unified_reward": {"unified_reward": lambda outcome: _score(outcome) / 5},  # from 1 to 5 of an image
}


def _geneval_scores(outcomes: Sequence[Outcome], geneval: GenEvalRequest) -> Scores:
    judged = [_judge(*pair) for pair in zip(outcomes, geneval["includes"], strict=True)]
    rewards = [0.0 if geneval["only_strict"] else reward for _, reward, _ in judged]
    return {
        "gen_eval_score": [score for score, _, _ in judged],
        "gen_eval_reward": rewards,
        "gen_eval_strict": [strict for _, _, strict in judged],
        "gen_eval_group": {
            task: [reward if tag == task else OTHER_TASK for tag, reward in zip(geneval["tags"], rewards, strict=True)]
            for task in TASKS
        },
    }


def _judge(outcome: Outcome, include: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return GenEval's three verdicts: a graded score, whether all clauses are met, and with exactly their counts.

    The graded score is the mean over all conditions: of a count, 1 - |expected - detected| / expected; of a colour or
    position, how far it is met, where the count is right.
    """
    conditions = iter(outcome.extra["conditions"])
    terms: list[float] = []
    met, exact = True, True
    for clause in include:
        expected, detected = clause["count"], outcome.extra["found"].get(clause["class"], 0)
        terms.append(1 - abs(expected - detected) / expected)
        exact = exact and detected == expected
        _, count = next(conditions)
        met = met and count == 1
        for _ in (key for key in ("color", "position") if clause.get(key) is not None):
            _, part = next(conditions)
            met = met and part == 1
            terms.append(part if detected == expected else 0.0)
    return sum(terms) / len(terms), float(met), float(met and exact)

"""cosmos-rl's reward service: `POST /api/reward/enqueue` answers with an id, `POST /api/reward/pull` with scores.

Clients retry a request 60 times within an hour, after any status from 400 on, or only after 408, 425, 429 and from 500
on. So a pull without a result answers 425, where cosmos-rl's service answers 400, and a permanent error is a 200
without scores. `/push` and `/latent_attr`, by which anyone could set scores and load weights, do not exist.

The body of an enqueue is JSON, a line end, and one tensor of all samples, as .npy or safetensors, never as a pickle.
image    uint8 [B, H, W, 3], or [B, 3, H, W] where W is not 3
video    uint8 [B, 3, T, H, W]
latent   float [B, C, T, H, W]; uint8 as .npy is bfloat16 byte by byte, [B, C, T, H, 2 W]
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, model_validator
from safetensors import SafetensorError, deserialize

from vlmrm.conversation import Outcome
from vlmrm.errors import MediaError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import State, Status
from vlmrm.serving.clients import current_request
from vlmrm.serving.errors import InvalidRequest, NotServing
from vlmrm.serving.gateway import Gateway, check_lengths, gateway_of
from vlmrm.serving.media import decoded_size, read_npy, write_npy
from vlmrm.serving.settings import Limits, RewardSettings
from vlmrm.serving.strict_json import Column, body_of, strict_json, validated
from vlmrm.serving.worker.channel import redact_paths

KEPT_BYTES = 4096  # of a sample, as JSON, for as long as its result
MediaType = Literal["image", "video", "latent"]


def _frame_rate(info: dict[str, Any]) -> dict[str, Any]:
    """Read `video_fps`, as cosmos-rl's service does, or `fps`, as its documentation says."""
    rate = info.get("video_fps", info.get("fps"))
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1e6:
        raise ValueError("video_fps is missing or wrong: say how many frames a second the video has")
    return {**info, "video_fps": float(rate)}


class Metadata(BaseModel):
    """B prompts and the rewards of their samples; unknown keys go to the handlers of `engine` rewards."""

    model_config = ConfigDict(extra="allow")

    prompts: Column[str] = Field(min_length=1)
    reward_fn: dict[str, StrictInt | StrictFloat] = Field(min_length=1)
    media_type: MediaType = "latent"
    video_infos: Column[Annotated[dict[str, Any], AfterValidator(_frame_rate)]] | None = None
    geneval_tags: Column[str] | None = None
    geneval_includes: Column[Column[dict[str, Any]]] | None = None
    geneval_only_strict: bool = False

    @model_validator(mode="before")
    @classmethod
    def _rename_old_keys(cls, content: Any) -> Any:
        """Read the `prompt`, `tag` and `include` of older clients, which send GenEval one image."""
        if isinstance(content, dict) and isinstance(kind := content.get("media_type"), str):
            content = {**content, "media_type": kind.lower()}
        if isinstance(content, dict) and "prompts" not in content and "prompt" in content:
            names = {"prompt": "prompts", "tag": "geneval_tags", "include": "geneval_includes"}
            return {names.get(key, key): [value] if key in names else value for key, value in content.items()}
        return content

    @model_validator(mode="after")
    def _check_lengths(self) -> Metadata:
        infos = None if self.media_type == "image" else self.video_infos
        geneval = {"geneval_tags": self.geneval_tags, "geneval_includes": self.geneval_includes}
        check_lengths(self.prompts, "prompts", video_infos=infos, **geneval)
        if self.media_type != "image" and self.video_infos is None:
            raise ValueError("video_infos is missing: say the video_fps of each video")
        if (self.geneval_tags is None) != (self.geneval_includes is None):
            raise ValueError("geneval_tags and geneval_includes go together: send both")
        kept = len(json.dumps([self.video_infos, self.geneval_tags, self.geneval_includes]))
        if kept > KEPT_BYTES * len(self.prompts):
            what = f"video_infos, geneval_tags and geneval_includes have {kept} bytes"
            raise ValueError(f"{what}, over {KEPT_BYTES} for each sample: leave out what no reward reads")
        return self


class Pull(BaseModel):
    """`type` may be left out where the request had one reward."""

    uuid: str = Field(min_length=1, max_length=64)
    type: str | None = None


class MediaBatch(NamedTuple):
    """Images [3, H, W], videos [T, 3, H, W] or latents [C, T, H, W], and the answer's `input_info`."""

    samples: list[np.ndarray]
    info: dict[str, Any]


def read_media(data: bytes, kind: MediaType, limits: Limits) -> MediaBatch:
    values, dtype = _read_tensor(data)
    if min(values.shape, default=0) < 1:
        raise MediaError(f"a tensor of shape {list(values.shape)} has nothing in it")
    if len(values) > limits.max_items:
        raise MediaError(f"there are {len(values)} samples, over the limit of {limits.max_items}")
    if kind == "image":
        if dtype != "uint8" or values.ndim != 4 or 3 not in (values.shape[-1], values.shape[1]):
            raise MediaError(f"images are {dtype} {list(values.shape)}: send uint8 [B, H, W, 3]")
        samples = values if values.shape[-1] != 3 else values.transpose(0, 3, 1, 2)
        frames, height, width = 1, *samples.shape[2:]
    elif kind == "video":
        if dtype != "uint8" or values.ndim != 5 or values.shape[1] != 3:
            raise MediaError(f"videos are {dtype} {list(values.shape)}: send uint8 [B, 3, T, H, W]")
        samples = values.transpose(0, 2, 1, 3, 4)
        frames, height, width = values.shape[2:]
    else:
        values = _latents(values, dtype)
        frames, height, width = decoded_size(values.shape[1:])
        samples = values.astype(np.float32) if dtype == "float64" else values
        dtype = "bfloat16"  # to which cosmos-rl's service converts latents before it describes them
    limits.check_image(width, height)
    if len(samples) * frames * height * width > limits.max_total_pixels:
        sent = f"{len(samples)} samples of {frames} frames of {width}x{height} pixels"
        raise MediaError(
            f"{sent} are over the limit max_total_pixels of {limits.max_total_pixels}: send fewer at a time"
        )
    if frames > limits.max_frames:
        raise MediaError(f"a video has {frames} frames, over the limit of {limits.max_frames}")
    bounds = (values.min(), values.max())
    low, high = map(_round_bfloat16, bounds) if dtype == "bfloat16" else map(float, bounds)
    info = {"shape": list(values.shape), "dtype": f"torch.{dtype}", "min": f"{low:.3f}", "max": f"{high:.3f}"}
    return MediaBatch(list(samples), info)


SAFETENSORS = {"U8": "u1", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}


def _read_tensor(data: bytes) -> tuple[np.ndarray, str]:
    """Return the values, bfloat16 as float32, and torch's name of their type."""
    if data.startswith(b"\x93NUMPY"):
        values = read_npy(data)
        kind = values.dtype.newbyteorder("=")
        return values.astype(kind, copy=False), str(kind)
    if data[8:9] != b"{":  # of safetensors: the length of the header, then its JSON
        form = "as torch.save writes it, which is a pickle and refused" if data.startswith(b"PK") else "no tensor"
        raise MediaError(f"what follows the JSON is {form}: send numpy.save's .npy or safetensors")
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        raise MediaError(f"the safetensors cannot be read ({error})") from error
    if len(tensors) != 1:
        raise MediaError(f"the safetensors hold {len(tensors)} tensors: send one of all samples")
    [(_, tensor)] = tensors
    if tensor["dtype"] not in SAFETENSORS:
        raise MediaError(f"a tensor is {tensor['dtype']}: choose from {', '.join(SAFETENSORS)}")
    values = np.frombuffer(tensor["data"], SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])
    return (_widen(values), "bfloat16") if tensor["dtype"] == "BF16" else (values, str(values.dtype))


def _latents(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return latents of a floating type, all finite."""
    if values.ndim == 5 and values.shape[1] == 3:
        raise MediaError("latents have 3 channels, as videos do: send media_type video, or image")
    if dtype == "uint8" and values.ndim == 5 and values.shape[-1] % 2 == 0:
        values, dtype = _widen(np.ascontiguousarray(values).view("<u2")), "bfloat16"
    if dtype not in ("float16", "bfloat16", "float32", "float64") or values.ndim != 5:
        raise MediaError(f"latents are {dtype} {list(values.shape)}: send float16 or float32 [B, C, T, H, W]")
    if not np.isfinite(values).all():
        raise MediaError("latents have values that are not finite")
    return values


def _widen(halves: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers, as uint16, in float32, of which they are the upper halves."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _round_bfloat16(value: Any) -> float:
    """Return the nearest bfloat16, ties to even."""
    [bits] = np.array([value], np.float32).view(np.uint32)
    return float(_widen(np.array([(int(bits) + 0x7FFF + (int(bits) >> 16 & 1)) >> 16], np.uint32))[0])


RESULTS = "/api/reward/pull"  # asks for what has been accepted

router = APIRouter(prefix="/api/reward", tags=["cosmos-rl"])

BODY = {"type": "string", "format": "binary", "description": "<JSON>, a line end, .npy or safetensors"}
ENQUEUE = body_of({"application/octet-stream": BODY})
PULL = body_of(dict.fromkeys(("application/x-www-form-urlencoded", "application/json"), Pull.model_json_schema()))
PULL_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "There is no such result, or the request is wrong."},
    425: {"description": "There is no result yet: its `state` is queued or running."},
}


@router.post("/ping")
@router.post("/pin")
async def ping() -> dict[str, str]:
    """Answer whether the service is there and accepts the token, whatever the body."""
    return {"message": "Ping request received"}


@router.post("/enqueue", openapi_extra=ENQUEUE)
async def enqueue(request: Request) -> dict[str, str]:
    """Return `{"uuid"}` once every reward is accepted; with `replica_id` where a load balancer routes by it."""
    gateway = gateway_of(request)
    metadata, media = _read(gateway, await request.body())
    rewards = [gateway.authorized_reward(request, name) for name in metadata.reward_fn]
    for reward in rewards:
        _check_required(gateway, reward, metadata)
    files = list(map(write_npy, media.samples))
    items = {reward.name: _items(reward, metadata, files) for reward in rewards}
    jobs: dict[str, str] = {}
    try:
        for name in items:
            jobs[name] = await gateway.core.put(gateway.job(name, items[name]))
    except BaseException:  # all or nothing, also when the client disconnects meanwhile
        for job_id in jobs.values():
            await gateway.core.cancel(job_id)
        raise
    names = ("tags", "includes", "only_strict")
    geneval = None if metadata.geneval_tags is None else {name: getattr(metadata, f"geneval_{name}") for name in names}
    info = media.info if metadata.media_type == "image" else {**media.info, "video_infos": metadata.video_infos}
    request_id = str(uuid.uuid4())
    await _save(gateway, request_id, {"jobs": jobs, "input_info": info, "geneval": geneval})
    replica = os.environ.get("LEPTON_REPLICA_ID")
    return {"uuid": request_id, **({"replica_id": replica} if replica else {})}


def _read(gateway: Gateway, body: bytes) -> tuple[Metadata, MediaBatch]:
    head, newline, data = body.partition(b"\n")
    if not newline:
        raise MediaError("the body has no line end after its JSON: send <JSON>, a line end, and the media")
    metadata = validated(Metadata, strict_json(head, gateway.settings.limits))
    if metadata.media_type == "latent":
        health = gateway.core.state.decoder
        if health is None:
            advice = "set [decode_args] model_path in its configuration, or send frames with media_type video."
            raise InvalidRequest(f"this service has no decoder of latents: {advice}")
        if health.unavailable:
            raise NotServing("the decoder of latents cannot be loaded now: see /ready.")
    media = read_media(data, metadata.media_type, gateway.settings.limits)
    if len(media.samples) != len(metadata.prompts):
        raise InvalidRequest(f"there are {len(metadata.prompts)} prompts but {len(media.samples)} samples of media.")
    return metadata, media


def _check_required(gateway: Gateway, reward: RewardSettings, metadata: Metadata) -> None:
    """Check that a reward gets what it needs; before a worker has loaded, only its job can fail for want of it."""
    if reward.reward_type == "unified_reward" and metadata.media_type != "image":
        raise InvalidRequest(f"the reward {reward.name} is of images here: its scores of videos have another scale.")
    sent = {"prompt", "image" if metadata.media_type == "image" else "video"}  # as rewards see it
    if metadata.geneval_tags is not None:
        sent.add("metadata")
    for column in gateway.info(reward.name).get("required", ()):
        if column not in sent:
            name = "geneval_tags and geneval_includes" if column == "metadata" else column
            raise InvalidRequest(f"the reward {reward.name} needs {name}, which the request does not have.")


def _items(reward: RewardSettings, metadata: Metadata, files: Sequence[bytes]) -> list[Item]:
    """Return the samples as a reward's worker takes them, with the samples of one prompt in one group."""
    items: list[Item] = []
    column = "latents" if metadata.media_type == "latent" else metadata.media_type
    for index, prompt in enumerate(metadata.prompts):
        item: Item = {"prompt": prompt, column: {"npy": files[index]}, "group": prompt}
        if column != "image":
            item["fps"] = (metadata.video_infos or [])[index]["video_fps"]
        if reward.engine:  # a handler is called with all samples of a request, and all that it says
            item |= {"group": "request", "request": metadata.model_dump(exclude={"prompts", "reward_fn"})}
        if reward.reward_type == "gen_eval" and metadata.geneval_tags and metadata.geneval_includes:
            item["metadata"] = {"tag": metadata.geneval_tags[index], "include": metadata.geneval_includes[index]}
        items.append(item)
    return items


@router.post("/pull", openapi_extra=PULL, responses=PULL_RESPONSES)
async def pull(request: Request) -> JSONResponse:
    """Return the result of one reward, any number of times; 425 with its `state` until there is one."""
    gateway = gateway_of(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        content = strict_json(await request.body(), gateway.settings.limits)
    else:
        content = dict(await request.form(max_files=0, max_fields=10))
    body = validated(Pull, content)
    if body.type in gateway.rewards:
        gateway.authorized_reward(request, body.type)

    def missing(status: int, state: str, reason: str = "") -> JSONResponse:
        return JSONResponse({"message": f"Not found scores for {body.uuid}{reason}", "state": state}, status)

    record = await gateway.core.load_record(f"cosmos:{body.uuid}")
    if record is None:
        return missing(400, "unknown")
    jobs = record["jobs"]
    name = next(iter(jobs)) if body.type is None and len(jobs) == 1 else body.type
    if name is None or name not in jobs:
        return missing(400, "unknown", f": it was asked for {', '.join(jobs)}: name one of them as type")
    await _save(gateway, body.uuid, record)  # for another `result_ttl`
    status = await gateway.core.wait(jobs[name], gateway.settings.long_poll)
    if status is not None and not status.finished:
        return missing(425, status.state.value)
    reward = gateway.authorized_reward(request, name)
    if status is not None and status.revision:
        current_request().revisions[name] = status.revision
    return JSONResponse(_answer(reward, status, record))


async def _save(gateway: Gateway, request_id: str, record: dict[str, Any]) -> None:
    """Keep the job of each reward, and further fields of the answer, for as long as results are kept."""
    await gateway.core.save_record(f"cosmos:{request_id}", record, gateway.settings.limits.result_ttl)


def _answer(reward: RewardSettings, status: Status | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return cosmos-rl's documented result; `scores` is null where `error` is set."""
    outcomes = (status.outcomes if status is not None else None) or []
    answer = {
        "scores": None,
        "input_info": record["input_info"],
        "duration": f"{(status.seconds if status is not None else None) or 0.0:.2f}",
        "decoded_duration": f"{sum(outcome.decode_seconds for outcome in outcomes):.2f}",
        "type": reward.name,
    }
    errors = [f"sample {n}: {outcome.error}" for n, outcome in enumerate(outcomes) if outcome.error is not None]
    if status is None:
        return {"error": "its result is no longer kept: send it again.", **answer, "state": State.expired.value}
    if status.state is State.done and not errors:
        return {**answer, "scores": cosmos_scores(reward, outcomes, record["geneval"])}
    error = f"it could not be computed: {status.error}."
    if status.state is State.done:
        error = errors[0] + (f" (and {len(errors) - 1} more)." if errors[1:] else ".")
    return {"error": redact_paths(error), **answer, "state": State.failed.value}


Scores: TypeAlias = Mapping[str, Any]  # a value for each sample under the reward's own keys, nested or not
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # of GenEval
OTHER_TASK = -10.0  # in gen_eval_group, for samples of another task


def cosmos_scores(reward: RewardSettings, outcomes: Sequence[Outcome], geneval: dict[str, Any] | None) -> Scores:
    """Return the scores of all samples under the keys that cosmos-rl's clients read, lists of one value a sample."""
    if reward.engine and all("scores" in outcome.extra for outcome in outcomes):  # a handler's own keys
        return _stack([outcome.extra["scores"] for outcome in outcomes])
    if reward.reward_type == "gen_eval" and geneval is not None:
        return _geneval_scores(outcomes, geneval)
    keys = KEYS.get(reward.reward_type) or {reward.name: _score}
    return {key: [read(outcome) for outcome in outcomes] for key, read in keys.items()}


def _stack(scores: Sequence[Scores]) -> Scores:
    return {
        key: _stack([sample[key] for sample in scores])
        if isinstance(value, dict)
        else [sample[key] for sample in scores]
        for key, value in scores[0].items()
    }


def _score(outcome: Outcome) -> float:
    assert outcome.score is not None  # a request with an error has no scores
    return outcome.score


# As cosmos-rl's own handlers of these rewards call them.
KEYS: dict[str, dict[str, Callable[[Outcome], Any]]] = {
    "cosmos_reason1": {
        "prediction": lambda it: "Bad" if it.extra["logits"]["yes"] > it.extra["logits"]["no"] else "Good",
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
    **{name: {name: _score} for name in ("hpsv2", "pickscore", "hpsv3", "image_reward")},
    "ocr": {"ocr_reward": _score},
    "unified_reward": {"unified_reward": lambda outcome: _score(outcome) / 5},  # from 1 to 5 of an image
}


def _geneval_scores(outcomes: Sequence[Outcome], geneval: dict[str, Any]) -> Scores:
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

    The graded score is a mean: of counts, 1 - |expected - detected| / expected; of colours and positions, where the
    count is right, how far they are met.
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

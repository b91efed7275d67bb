"""`vlmrm score`: answers to a prompt, or the rows of a table. Heavy imports happen inside, so that help is instant."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vlmrm.conversation import Image, Message, media_of
from vlmrm.data.columns import parse_columns
from vlmrm.errors import ConfigError, DataError
from vlmrm.libraries import needs
from vlmrm.logs import counted, say
from vlmrm.outputs import ONE

if TYPE_CHECKING:
    from vlmrm.scoring.offline import OfflineJob


def score(
    *,
    model: str | None = None,
    url: str | None = None,
    prompt: str | None = None,
    response: list[str] | None = None,
    image: list[str] | None = None,
    response_image: list[str] | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    data: Annotated[list[str] | None, Parameter(name="--input", consume_multiple=True)] = None,
    output: Path | None = None,
    split: str | None = None,
    image_root: str | None = None,
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    shard_rows: int | None = None,
    batch_rows: int | None = None,
    num_workers: int | None = None,
    max_tokens_per_batch: int | None = None,
    ray_workers: int | None = None,
    device: str | None = None,
    dtype: str = "auto",
) -> None:
    """Score answers to a prompt, or every row of a table: higher is better, and only differences mean something.

    Args:
        model: A trained checkpoint; with --url the name of a reward, where the service has several.
        url: The address of a service (vlmrm serve) that has the model. The token is VLMRM_TOKEN of the environment.
        prompt: The question.
        response: An answer; repeat the option for each.
        image: An image of the prompt; repeat the option for several.
        response_image: An image that answers the prompt (text-to-image); repeat the option for each.
        json_output: Print one JSON object.
        data: Instead of a prompt: files, folders, patterns or hub ids of rows.
        output: Folder for the scores of those rows, as parquet shards; finished shards in it are kept.
        split: Split of hub data sets and save_to_disk folders. Default: train.
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        shard_rows: Rows in a shard. Default: 4096.
        batch_rows: Rows read at a time. Default: 32.
        num_workers: Processes that open images ahead of the model. Default: up to four beside a GPU, else none.
        max_tokens_per_batch: Tokens computed at once; lower it when memory runs out. Default: 16384.
        ray_workers: Score on a Ray cluster with so many workers.
        device: Default: the GPU where there is one.
        dtype: auto, bfloat16, float16 or float32.
    """
    of_prompt = {"response": response, "image": image, "response_image": response_image, "json": json_output or None}
    of_job: dict[str, Any] = {
        "split": split,
        "image_root": image_root,
        "columns": parse_columns(columns),
        "shard_rows": shard_rows,
        "batch_rows": batch_rows,
        "num_workers": num_workers,
        "max_tokens_per_batch": max_tokens_per_batch,
    }
    of_table = {"output": output, **of_job, "ray_workers": ray_workers}
    if data is None:
        if prompt is None:
            raise ConfigError("there is nothing to score: give --prompt, with its answers, or --input and --output.")
        _refuse(of_table, "goes with --input, and --prompt says what to score: give one of them.")
        messages = [Message.of("user", *map(Image, image or []), prompt)]
        answers = _score_answers(model, url, messages, response or [], response_image or [], device, dtype)
        if json_output:
            say(json.dumps({"model": model, "prompt": prompt, "answers": answers}, indent=2))
            return
        best = max(answers, key=lambda answer: answer["score"])
        for answer in answers:
            outputs = ", ".join(f"{name} {value:.4g}" for name, value in answer.get("outputs", {}).items())
            named = f"  ({outputs})" if outputs else ""
            say(f"{answer['score']:+9.4f}  {answer['answer']}{named}{'  <- best' if answer is best else ''}")
        return
    if prompt is not None:
        raise ConfigError("--prompt and --input both say what to score: give one of them.")
    if output is None:
        raise ConfigError("--output is missing: name a folder for the scores.")
    if url is not None or model is None:
        raise ConfigError("--input is scored with a checkpoint on this machine: give --model, and no --url.")
    _refuse(of_prompt, "goes with --prompt, and --input says what to score: give one of them.")
    with needs("train", "scoring a table"):
        from vlmrm.scoring.offline import OfflineJob

    given = {name: value for name, value in of_job.items() if value is not None}
    job = OfflineJob(model, data, output, device=device, dtype=dtype, **given)
    say(_score_table(job, ray_workers))


def _refuse(options: dict[str, Any], reason: str) -> None:
    if names := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"--{names[0].replace('_', '-')} {reason}")


def _score_answers(
    model: str | None,
    url: str | None,
    prompt: Sequence[Message],
    responses: Sequence[str],
    images: Sequence[str],
    device: str | None,
    dtype: str,
) -> list[dict[str, Any]]:
    """Return `{"answer", "score", "digest"}` of each answer in order, texts before images."""
    if not responses and not images:
        raise ConfigError(
            "there is no answer to score: give --response TEXT (or --response-image FILE) once for each."
        )
    from vlmrm.data.media import image_size

    for picture in [*(medium.reference for medium in media_of(prompt)), *images]:
        image_size(picture)  # a model takes minutes to load, and would then find it missing
    from vlmrm.scoring.loading import is_address, load_scorer
    from vlmrm.scoring.protocol import all_scores, conversations_of

    if url is not None:
        if not is_address(url):
            raise ConfigError(f"--url {url} is no address: write it as http://host:port.")
        scorer = load_scorer(url, reward=model, device=device, dtype=dtype)
    elif model is not None:
        scorer = load_scorer(model, device=device, dtype=dtype)
    else:
        raise ConfigError("there is nothing to score with: give --model CHECKPOINT, or --url http://host:port.")
    answers = [*responses, *(Message.of("assistant", Image(path)) for path in images)]
    names = [*responses, *images]
    local: Any = scorer
    [group] = conversations_of([(prompt, answers)])
    try:
        named: Any = all_scores(local.score_outputs(group))
        one = {*named[0]} <= {*ONE.names}
        if url is None or one:
            scores = [*map((ONE if one else local.outputs).number, named)]
        else:  # how it weighs its outputs, a service alone knows
            [scores] = scorer.score_groups([(prompt, answers)])
    except ConfigError as error:
        if url is None or "choose from" not in str(error):
            raise
        raise ConfigError(f"{str(error).rstrip('.')} with --model NAME.") from error  # the rewards of a service
    rows = zip(names, scores, ({} if one else {"outputs": it} for it in named), strict=True)
    return [{"answer": name, "score": score, **of, "digest": scorer.digest} for name, score, of in rows]


def _score_table(job: OfflineJob, ray_workers: int | None) -> str:
    """Score the job's rows, as a rank of the launcher or on Ray, and return the closing line."""
    if ray_workers is not None:
        from vlmrm.scoring.offline import score_on_ray

        summary = score_on_ray(job, ray_workers)
    else:
        import torch

        from vlmrm.scoring.offline import score_offline

        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if ranks > 1 and job.device is None and torch.cuda.is_available():
            job = replace(job, device=f"cuda:{os.environ['LOCAL_RANK']}")
        summary = score_offline(job, rank=rank, ranks=ranks)
    if summary is None:
        return f"this process has scored its share into {job.output}; other processes are still running"
    if summary.errors:
        raise DataError(
            f"{summary.errors} of {counted(summary.rows, 'row')} could not be scored: see the column error of "
            f"{job.output}."
        )
    return f"scored {counted(summary.rows, 'row')} into {job.output}"

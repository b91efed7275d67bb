"""Open a scorer by name: a checkpoint on this machine, or a service. Only a checkpoint imports torch."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrm.errors import ConfigError
from vlmrm.libraries import needs, parse_dtype
from vlmrm.scoring.remote import RemoteScorer

if TYPE_CHECKING:
    from vlmrm.scoring.scorer import LocalScorer

HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")


def load_scorer(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    attn_implementation: str = "auto",
    max_tokens_per_batch: int = 16384,
    batching: str = "shared",
    base_model_path: str | None = None,
    trust_remote_code: bool = False,
    vision_cache_dir: str | Path | None = None,
    vision_cache_gb: float = 50.0,
    cache_bytes: int | None = 0,
    cuda_graphs: bool = False,
    check_sight: bool = True,
    check_files: bool = True,
    reward: str | None = None,
) -> LocalScorer | RemoteScorer:
    """Load a checkpoint folder as a scorer after verifying it, or connect to the service at `http://host:port`.

    With an address every option but `reward` must be left out: the service has its own. `RemoteScorer` takes more.

        scorer = load_scorer("outputs/mine/best")  # or "http://host:8080"
        [[right, wrong]] = scorer.score_groups([("What is 2 + 2?", ["4", "5"])])

    Args:
        device: default: the GPU, where there is one.
        dtype: `auto` (the checkpoint's), bfloat16, float16 or float32.
        max_tokens_per_batch: bound on memory; a single longer conversation is still scored, alone.
        batching: `shared`, or `reference` to compute every conversation in full.
        base_model_path: where the base model of an adapter checkpoint is now.
        vision_cache_dir: folder that keeps the vision tower's features of images.
        cache_bytes: bound on what is kept in memory between calls, so that a later answer to the same prompt costs its
            own tokens: media, features of images, and prompts. 0 keeps nothing, None a quarter of a GPU's free memory.
        cuda_graphs: replay the language model's forward of short rows; no GPU has measured it.
        check_sight: verify that the model sees, and that shared batches give exact scores.
        check_files: hash every file that the checkpoint's `COMPLETE.json` lists.
        reward: name of one reward, of a service that has several.
    """
    options = locals()
    if is_address(model):
        for name, parameter in inspect.signature(load_scorer).parameters.items():
            if name not in ("model", "reward") and options[name] != parameter.default:
                raise ConfigError(f"{name} is an option of checkpoints, and a service has its own: leave it out.")
        return RemoteScorer(str(model), model=reward)
    if HOST_AND_PORT.fullmatch(str(model)) and not Path(model).exists():
        raise ConfigError(f"{model} is no folder: an address begins with http://, and this is none without it.")
    if reward is not None:
        raise ConfigError(f"reward is an option of a service, and {model} is a folder: leave reward out.")
    for name in ("check_sight", "check_files", "cuda_graphs", "trust_remote_code"):
        if not isinstance(options[name], bool):  # the text "false" would count as true
            raise ConfigError(f"{name} is {options[name]!r}: write true or false.")
    if cache_bytes is not None and (type(cache_bytes) is not int or cache_bytes < 0):
        raise ConfigError(f"cache_bytes is {cache_bytes!r}: write a number of bytes, or 0 to keep nothing.")
    dtype = parse_dtype(dtype, auto=True)
    with needs("local", "scoring with a checkpoint"):
        from vlmrm.modeling import load_checkpoint
        from vlmrm.scoring.scorer import LocalScorer
    loaded = load_checkpoint(
        model,
        dtype=dtype,
        attn_implementation=attn_implementation,
        device=device,
        trust_remote_code=trust_remote_code,
        base_model_path=base_model_path,
        batching=batching,
        check_sight=check_sight,
        check_files=check_files,
    )
    loaded.model.requires_grad_(False)
    if vision_cache_dir is not None:
        loaded.model.use_vision_cache(vision_cache_dir, vision_cache_gb)
    kept = {name: options[name] for name in ("max_tokens_per_batch", "batching", "cache_bytes", "cuda_graphs")}
    return LocalScorer(loaded, **kept)


SCORER_OPTIONS = tuple(inspect.signature(load_scorer).parameters)


def load_local_scorer(model: str | Path, **options: Any) -> LocalScorer:
    """Load a checkpoint folder as `load_scorer` does, for callers that need the model itself."""
    if is_address(model):
        raise ConfigError("a service has no model on this machine, which is needed: give the folder of a checkpoint.")
    scorer: Any = load_scorer(model, **options)
    return scorer


def is_address(model: str | Path) -> bool:
    """Return whether `model` is the address of a service, not a folder."""
    return str(model).startswith(("http://", "https://"))

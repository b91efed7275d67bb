"""Open full checkpoints: a vision-language model to train, or a reward model to train further, evaluate or serve.

Nothing is opened on trust: a weight that is missing, left over or of another shape is an error, and so is a chat
template other than the one a reward model was trained with.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError  # a configuration that contradicts itself
from safetensors import SafetensorError
from transformers import MODEL_MAPPING, AutoConfig, AutoProcessor, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from vlmrm.errors import CheckpointError, ConfigError, first_line
from vlmrm.libraries import relies_on
from vlmrm.modeling.attention import resolve_attention
from vlmrm.modeling.head import HEADS, head_name
from vlmrm.modeling.manifest import (
    ADAPTER_CONFIG,
    ADAPTERS,
    BEST,
    FINAL,
    HEAD_WEIGHTS,
    WEIGHTS,
    file_names,
    find_checkpoints,
    find_file,
    head_files,
    is_adapter,
    read_json_of,
    read_reward_file,
    template_hash,
    verify_if_listed,
    weight_names,
)
from vlmrm.modeling.reward_model import RewardModel, reward_model_class
from vlmrm.outputs import ONE, Outputs

logger = logging.getLogger("vlmrm")

relies_on(PreTrainedModel, "_supports_sdpa")


def load_for_training(
    path: str | Path,
    *,
    head: str | Mapping[str, Any] | None = None,
    outputs: Outputs = ONE,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    quantization_config: Any = None,
    check_files: bool = True,
) -> RewardModel:
    """Load a vision-language checkpoint with a new head made from `seed`, or a reward model with its trained head.

    `head` is `linear`, `mlp`, or as a reward model's configuration describes it; by default a reward model's own, and
    linear for a new one. `outputs` are of a new head, and must be those of a trained one. `dtype` is a torch type, its
    name, or `auto` for the stored one; the head is float32 in any case. `check_files` hashes the files that
    `COMPLETE.json` lists.
    """
    if isinstance(head, str) and head not in HEADS:
        raise ConfigError(f"head is {head!r}: choose one of {', '.join(HEADS)}.")
    verify_if_listed(path, check_files)
    if is_adapter(path, revision):
        raise CheckpointError(f"{path} is an adapter: make a full checkpoint of it first, with `vlmrm merge`.")
    config = read_config(path, revision, trust_remote_code)
    has_head = _is_reward_model(config)
    if has_head and head is not None and _head_of(config) != head:
        kept = _head_of(config) if _head_of(config) in HEADS else "null"
        raise CheckpointError(
            f"{path} is a reward model with a {head_name(_head_of(config))} head: set head: {kept}, or start from its "
            "base model."
        )
    if has_head and (kept := Outputs.of(getattr(config, "reward_outputs", None))) != outputs:
        written = ", ".join(f"{one.name}: {one.written()}" for one in kept)
        total = ", ".join(f"{one.name}: {one.weight:.12g}" for one in kept if one.weight)
        raise CheckpointError(
            f"{path} is a reward model with other outputs: write outputs: {{{written}}} and total: {{{total}}}, or "
            "start from its base model."
        )
    refuse_separate_head(path, revision)
    if not has_head and (described := outputs.described()) is not None:
        config.reward_outputs = described
    config.reward_head = head or (_head_of(config) if has_head else "linear")
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        # New weights are initialised while loading: seeding any later would leave the head to chance.
        torch.manual_seed(seed)
        return _load(
            path,
            config,
            new_head=not has_head,
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
            quantization_config=quantization_config,
        )


def load_reward_model(path: str | Path, *, trust_remote_code: bool, **options: Any) -> RewardModel:
    """Load the trained reward model of a full checkpoint; `options` are those of `load_for_training`."""
    config = read_config(path, None, trust_remote_code)
    if not _is_reward_model(config):
        refuse_separate_head(path)
        refuse_torch_files(path)
        architecture = next(iter(config.architectures or []), config.model_type)
        raise CheckpointError(
            f"{path} is a {architecture} and has no reward head of ours: train it first, with vlmrm train, or make "
            f"another trainer's one of ours by `vlmrm import {path} --output DIR`."
        )
    return _load(path, config, new_head=False, trust_remote_code=trust_remote_code, **options)


def load_scoring_files(
    path: str | Path, base_model_path: str | Path | None = None, trust_remote_code: bool = False
) -> tuple[ProcessorMixin, dict[str, Any]]:
    """Return the processor of a reward model and its `reward_model.json`, after comparing their chat templates."""
    source = path if base_model_path is None or _has_processor(path) else base_model_path
    processor = load_processor(source, trust_remote_code=trust_remote_code)
    info = read_reward_file(path)
    if info is None:
        logger.warning("%s has no reward_model.json: the input of its training cannot be checked", path)
        return processor, {}
    if template_hash(processor) != info["chat_template_sha256"]:
        raise CheckpointError(
            f"the chat template of {path} is not the one that the model was trained with: restore "
            "chat_template.jinja from the training run."
        )
    return processor, info


def load_processor(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> ProcessorMixin:
    """Return the processor of a folder or hub checkpoint."""
    if not _has_processor(path, revision):
        kind = (read_json_of(path, "config.json", revision) or {}).get("model_type")
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise CheckpointError(
                f"{path} is a text model ({kind}), and text models are not trained here: name a vision-language model."
            )
        if find_file(path, "config.json", revision) is None and not is_adapter(path, revision):
            raise no_checkpoint(path, "it has no config.json, so check the path")
        raise CheckpointError(f"{path} has no processor: name the model that it was trained from as base_model_path.")
    try:
        processor = AutoProcessor.from_pretrained(
            path, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"the processor of {path} cannot be read: {first_line(error)}") from error
    template_hash(processor)  # raises where there is no chat template
    return processor


def refuse_separate_head(path: str | Path, revision: str | None = None) -> None:
    """Refuse a checkpoint with a trained head in a file of its own: a new, random one would replace it silently."""
    if names := head_files(path, revision):
        raise foreign(path, f"a trained head in {names[0]}, which is another trainer's layout")


def refuse_torch_files(path: str | Path, revision: str | None = None) -> None:
    """Refuse weights in torch's files alone, which only the import opens: a trained head may be among them."""
    adapters = [name for name in file_names(path, revision) if name in ADAPTERS]
    names = adapters or weight_names(path, revision)
    if names and not any(name.endswith(WEIGHTS) for name in names):
        raise CheckpointError(
            f"{path} has its weights in {names[0]} and not in safetensors: make a reward model of another trainer one "
            f"of ours by `vlmrm import {path} --output DIR`, and save any other model again."
        )


def foreign(path: str | Path, what: str) -> CheckpointError:
    """Return the error about a checkpoint with something that only the import opens."""
    return CheckpointError(f"{path} has {what}: make it one of ours by `vlmrm import {path} --output DIR`.")


def _has_processor(path: str | Path, revision: str | None = None) -> bool:
    files = ("processor_config.json", "preprocessor_config.json")
    return any(read_json_of(path, name, revision) is not None for name in files)


def _load(
    path: str | Path,
    config: PreTrainedConfig,
    *,
    new_head: bool,
    attn_implementation: str,
    revision: str | None = None,
    **options: Any,
) -> RewardModel:
    model_class: Any = reward_model_class(config)
    attention = resolve_attention(attn_implementation)
    language_model: Any = MODEL_MAPPING.get(type(config.get_text_config()), model_class)
    if attention == "sdpa" and not (model_class._supports_sdpa and language_model._supports_sdpa):
        attention = "eager"  # which is all that transformers has for a few families, and for gpt-oss in InternVL
    try:
        with _quiet():
            model, report = model_class.from_pretrained(
                # Absolute, so that an adapter finds its base from any folder.
                str(Path(path).resolve()) if Path(path).is_dir() else path,
                config=config,
                attn_implementation=attention,
                revision=revision or "main",
                **options,
                use_safetensors=True,  # a pickle could run code
                ignore_mismatched_sizes=True,  # reported below, in a sentence
                output_loading_info=True,
            )
    except (OSError, SafetensorError, ValueError) as error:
        refuse_torch_files(path, revision)
        raise CheckpointError(f"the weights of {path} cannot be read: {first_line(error)}") from error
    _check_weights(path, model, report, new_head)
    return model


def _check_weights(path: str | Path, model: RewardModel, report: dict[str, Any], new_head: bool) -> None:
    heads = {name for name in model.state_dict() if name.startswith(("score.", "score_hidden."))}
    missing = set(report["missing_keys"])
    # transformers would drop an unknown head and make a random one in its place, with a line in the log.
    if other_heads := {key for key in report["unexpected_keys"] if HEAD_WEIGHTS.search(key)}:
        raise foreign(path, f"a trained head of another trainer's layout ({_some(other_heads)})")
    if new_head and missing >= heads:
        missing -= heads
    elif missing & heads:
        raise CheckpointError(
            f"{path} calls itself a reward model, but its head ({_some(missing & heads)}) is missing: save it again "
            "from the run that trained it."
        )
    wrong = {
        "lacks": missing,
        "has more than its architecture knows:": report["unexpected_keys"],
        "has other shapes than its configuration says:": {key for key, *_ in report["mismatched_keys"]},
    }
    for fault, keys in wrong.items():
        if keys:
            raise CheckpointError(
                f"{path} {fault} {_some(keys)}, {len(keys)} weights in all: it is broken or of another architecture "
                f"than {type(model).__name__}."
            )


def read_config(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the configuration of a folder or hub checkpoint."""
    try:
        return AutoConfig.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise no_checkpoint(path, first_line(error)) from error


def no_checkpoint(path: str | Path, reason: str) -> CheckpointError:
    """Return the error about what transformers cannot open, which may be the folder of a training."""
    inside = [Path(path) / BEST, Path(path) / FINAL, *reversed(find_checkpoints(path))]
    found = [str(it) for it in inside if any((it / name).is_file() for name in ("config.json", ADAPTER_CONFIG))]
    if found:
        names = " or ".join(found[:2])
        return CheckpointError(f"{path} holds checkpoints and is none itself: name one, such as {names}.")
    return CheckpointError(f"{path} is no checkpoint that transformers can open: {reason}")


def _is_reward_model(config: PreTrainedConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _head_of(config: PreTrainedConfig) -> Any:
    return getattr(config, "reward_head", "linear")


@contextmanager
def _quiet() -> Generator[None]:
    """Silence transformers' table of missing weights: `_check_weights` reports faults, and a new head is none."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _some(keys: set[str]) -> str:
    return ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")

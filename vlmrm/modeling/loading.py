"""Open trained reward models, full checkpoints and adapters, for scoring; and merge an adapter into its base."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import ProcessorMixin

from vlmrm.errors import CheckpointError, first_line
from vlmrm.files import require_new_folder
from vlmrm.libraries import parse_device
from vlmrm.modeling.adapters import keep_adapters_names
from vlmrm.modeling.checkpoint import (
    foreign,
    load_for_training,
    load_reward_model,
    load_scoring_files,
    refuse_separate_head,
    refuse_torch_files,
)
from vlmrm.modeling.manifest import (
    ADAPTER_CONFIG,
    FIGURES,
    HEAD_WEIGHTS,
    WEIGHTS,
    checkpoint_digest,
    find_file,
    is_adapter,
    local_folder,
    read_json_of,
    read_reward_file,
    save_reward_files,
    verify_if_listed,
    weights_digest,
    write_complete,
)
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.modeling.sight import prove_sight
from vlmrm.outputs import Outputs

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("vlmrm")

PEFT_PREFIX = "base_model.model."  # before the names of the model's weights in an adapter's file


@dataclass(frozen=True)
class LoadedReward:
    """A reward model ready to score, the processor it was trained with, and the content of its `reward_model.json`."""

    model: RewardModel
    processor: ProcessorMixin
    info: dict[str, Any]
    digest: str  # identifies the checkpoint by its content: `checkpoint_digest`
    digest_without_weights: str  # the same for all checkpoints of a training
    adapter: PeftModel | None = None  # holds the trained weights around `model`, where they are apart


def load_checkpoint(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    base_model_path: str | Path | None = None,
    batching: str = "shared",
    check_sight: bool = True,
    check_files: bool = True,
) -> LoadedReward:
    """Load and verify a reward model for scoring, full or adapter.

    `base_model_path` gives the processor to a checkpoint without one, and replaces the base that an adapter names.
    `check_sight` makes it prove that it sees and, for `batching: shared`, that such batches are exact; `check_files`
    hashes every byte that `COMPLETE.json` lists.
    """
    target = parse_device(device or None)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    listed = verify_if_listed(path, check_files)
    adapter = None
    if is_adapter(path):
        adapter = open_adapter(path, base_model_path=base_model_path, check_files=check_files, **options)
        model: Any = adapter.get_base_model()
    else:
        model = load_reward_model(path, **options)
    processor, info = load_scoring_files(path, base_model_path, trust_remote_code)
    model.to(target)
    model.eval()
    if check_sight:
        prove_sight(model, processor, name=path, batching=batching)
    else:
        logger.warning("check_sight: false: nothing checks that %s sees images", path)
    if listed is None:
        logger.warning("%s has no COMPLETE.json: its files cannot be verified", path)
    return LoadedReward(model, processor, info, *_digests(local_folder(path)), adapter)


def load_weights(opened: LoadedReward, path: str | Path, *, check_files: bool = True) -> LoadedReward | None:
    """Put the weights of another checkpoint into the open model, if the two differ in nothing else.

    So do the checkpoints of one training. It saves making the model, opening an adapter's base, and proving sight,
    which depends on the architecture and the libraries. The result shares model and processor with `opened`, which
    has the new weights too. For a checkpoint that must be opened by itself it is None, and the model stays as it was.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    listed = verify_if_listed(folder, check_files)
    digest, without_weights = _digests(folder)
    target = _trained_weights(opened)
    if without_weights != opened.digest_without_weights or target is None:
        return None
    files = sorted(folder.glob(f"*{WEIGHTS}"))
    try:
        with ExitStack() as stack:
            handles = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
            sources = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: sources[name].get_slice(name).get_shape() for name in sources}
            if shapes != {name: list(tensor.shape) for name, tensor in target.items()}:
                return None  # opening it says what is wrong
            with torch.no_grad():
                for name, tensor in target.items():
                    tensor.copy_(sources[name].get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights of {path} cannot be read: {first_line(error)}") from error
    if listed is None:
        logger.warning("%s has no COMPLETE.json: its files cannot be verified", path)
    return replace(opened, info=read_reward_file(folder) or {}, digest=digest)


def _digests(folder: Path) -> tuple[str, str]:
    """Return `checkpoint_digest` with and without the weights, of a folder whose listed files have been verified."""
    return checkpoint_digest(folder, check_files=False), checkpoint_digest(folder, check_files=False, weights=False)


def _trained_weights(opened: LoadedReward) -> dict[str, torch.Tensor] | None:
    """Return the tensors of the open model by the names that they have in its checkpoint; None where some are copies.

    A checkpoint is saved under the names that its weights have in memory.
    """
    in_memory = opened.model.state_dict()
    if opened.adapter is None:
        return in_memory
    from peft import get_peft_model_state_dict

    trained = get_peft_model_state_dict(opened.adapter, save_embedding_layers=False)
    addresses = {tensor.data_ptr() for tensor in in_memory.values()}
    return trained if all(tensor.data_ptr() in addresses for tensor in trained.values()) else None


def open_adapter(
    path: str | Path, *, base_model_path: str | Path | None = None, check_files: bool = True, **options: Any
) -> PeftModel:
    """Open an adapter on its base: the one it names, or `base_model_path`. `options` go to `load_for_training`.

    `check_files` hashes the base and compares it with the one that the adapter was trained on.
    """
    from peft import PeftModel, get_peft_model_state_dict

    info = read_reward_file(path) or {}
    base = base_model_path or (read_json_of(path, ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
    revision = None if base_model_path else info.get("provenance", {}).get("base_revision")
    if not base:
        raise CheckpointError(f"the adapter {path} does not name its base model: give it as base_model_path.")
    refuse_separate_head(path)
    weights = find_file(path, "adapter_model.safetensors")
    if weights is None:
        refuse_torch_files(path)
        raise CheckpointError(f"the adapter {path} has no adapter_model.safetensors: save it again.")
    with safe_open(weights, framework="pt") as file:
        saved = set(file.keys())
    if f"{PEFT_PREFIX}score.weight" not in saved:
        if other_head := next(filter(HEAD_WEIGHTS.search, sorted(saved)), None):
            raise foreign(path, f"a trained head of another trainer's layout ({other_head})")
        raise CheckpointError(f"the adapter {path} has no reward head: train it with modules_to_save: [score].")
    hidden = any(name.startswith(f"{PEFT_PREFIX}score_hidden.") for name in saved)
    head = info.get("head") or ("mlp" if hidden else "linear")
    outputs = Outputs.of(info.get("outputs"))
    model = load_for_training(base, head=head, outputs=outputs, revision=revision, check_files=check_files, **options)
    if check_files:
        _check_base(path, base, revision, info.get("base_digest"))
    keep_adapters_names()
    try:
        # Puts the trained head in place of the base's new one: modules_to_save.
        adapted = PeftModel.from_pretrained(model, str(path))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the adapter {path} does not fit its base {base}: name the one it was trained on."
        ) from error
    # peft leaves weights that it misses random, and passes over those that it does not know.
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with safe_open(weights, framework="pt") as file:
        pairs = {name: (file.get_tensor(name), loaded[name]) for name in saved & loaded.keys()}
    same = {name for name, (a, b) in pairs.items() if a.shape == b.shape and torch.equal(a.to(b), b)}  # of any type
    if wrong := (saved | loaded.keys()) - same:
        raise CheckpointError(
            f"the adapter {path} and its configuration differ in {len(wrong)} weights ({min(wrong)}, ...): save it "
            "again."
        )
    return adapted


def _check_base(path: str | Path, base: str | Path, revision: str | None, expected: str | None) -> None:
    """Refuse a base with other weights than the adapter was trained on: of equal shapes, it would load silently."""
    if expected is None:
        logger.warning(
            "the adapter %s was saved without the digest of its base: whether %s is that base cannot be checked",
            path,
            base,
        )
    elif expected != weights_digest(local_folder(base, revision)):
        raise CheckpointError(
            f"the adapter {path} was trained on other weights than those of {base}: give the base that it was trained "
            "on as base_model_path."
        )


def merge(adapter_folder: str | Path, output_folder: str | Path, base_model_path: str | Path | None = None) -> Path:
    """Write the adapter merged into its base, a full reward model with the same scores; return its folder."""
    adapter_folder, output_folder = Path(adapter_folder), Path(output_folder)
    require_new_folder(output_folder, "the merged model")
    if not (adapter_folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{adapter_folder} is no adapter: there is no {ADAPTER_CONFIG} in it.")
    manifest = verify_if_listed(adapter_folder) or {}
    processor, info = load_scoring_files(adapter_folder, base_model_path)
    merged = open_adapter(adapter_folder, base_model_path=base_model_path).merge_and_unload()
    provenance = {**info.get("provenance", {}), "merged_from": adapter_folder.name}
    write_full(output_folder, merged, processor, info | {"provenance": provenance}, step=manifest.get("step"))
    return output_folder


def write_full(
    folder: Path,
    model: Any,
    processor: Any,
    info: Mapping[str, Any],
    *,
    step: int | None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a complete full checkpoint; `info` is its former `reward_model.json`, `texts` more files by name."""
    model.save_pretrained(folder)
    for name, text in (texts or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    save_reward_files(
        folder,
        processor=processor,
        head=model.config.reward_head,
        provenance=info["provenance"],
        shown=info,
        **{name: info.get(name) for name in FIGURES},
        outputs=model.outputs,
    )
    write_complete(folder, world_size=1, step=step)

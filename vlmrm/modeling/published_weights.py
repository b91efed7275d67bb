"""Read published weights: code in a file is never run, and a weight that is missing or left over is an error."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from vlmrm.errors import CheckpointError, ConfigError, first_line
from vlmrm.libraries import hub_answers
from vlmrm.modeling.manifest import (
    ADAPTER_CONFIG,
    ADAPTERS,
    INDICES,
    SUFFIXES,
    file_names,
    find_file,
    head_files,
    hub_snapshot,
    is_adapter,
    read_json_of,
    weight_names,
)
from vlmrm.weights import is_torch_file, plain_weights, read_weight_file

T = TypeVar("T")

# Names of open_clip's CLIP and of transformers' `CLIPModel`: the start of a name, then its part inside a block.
OPEN_CLIP_NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",  # transformers spells it so
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    "transformer.resblocks": "text_model.encoder.layers",
}
OPEN_CLIP_BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
OPEN_CLIP_ATTENTION = re.compile(r"(.+)\.attn\.in_proj_(weight|bias)")

_shared: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()  # of `shared`, by function and key
_loading = threading.RLock()


def read_weights(path: str | Path, name: str | None = None) -> dict[str, Any]:
    """Return the content of a weight file by name; with `name`, `path` may be the folder or hub repository of it."""
    file = Path(path)
    if name is not None and not file.is_file():
        if (found := find_file(path, name)) is None:
            raise CheckpointError(f"there is no {name} in {path}: give the file, or the folder that has it.")
        file = found
    return read_weight_file(file)


def lora_merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + scale · BA of a linear layer, computed in float32, in the type of W."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)


def lora_scale(rank: int, alpha: float, rank_stabilised: bool | None) -> float:
    """Return the factor of BA: alpha / r, or alpha / sqrt(r) where it is rank-stabilised (Kalajdzievski 2023)."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def pretrained(cls: Any, path: str, **options: Any) -> Any:
    """Return `cls.from_pretrained(path)`; every weight of a model must come from the checkpoint."""
    try:
        if not issubclass(cls, PreTrainedModel):
            return cls.from_pretrained(path, **options)
        model, info = cls.from_pretrained(path, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise CheckpointError(f"{path} cannot be opened as {cls.__name__} ({reason}): check the path.") from error
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} weights of {cls.__name__}, such as {missing[0]}.")
    return model


def shared(load: Callable[..., T], *key: Hashable) -> T:
    """Return `load(*key)`, loaded once for as long as it is in use: two rewards of equal weights hold one copy."""
    with _loading:
        loaded = _shared.get((load, *key))
        if loaded is None:
            loaded = _shared[load, *key] = load(*key)
        return loaded


def open_clip_to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return open_clip's weights of a CLIP under the names, and in the shapes, of transformers' `CLIPModel`.

    open_clip keeps query, key and value in one matrix, and its projections transposed.
    """
    renamed: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name == "attn_mask":
            continue  # a constant
        top = next((old for old in OPEN_CLIP_NAMES if name == old or name.startswith(f"{old}.")), None)
        name = name if top is None else OPEN_CLIP_NAMES[top] + name[len(top) :]
        attention = OPEN_CLIP_ATTENTION.fullmatch(name)
        if attention:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{attention[1]}.self_attn.{part}_proj.{attention[2]}"] = piece.clone()
            continue
        for old, new in OPEN_CLIP_BLOCK_NAMES.items():
            name = re.sub(rf"(layers\.\d+)\.{re.escape(old)}\.", rf"\1.{new}.", name)
        renamed[name] = value.T.contiguous() if name.endswith("_projection.weight") else value
    return renamed


# What wrappers put before and into the names of weights.
NAME_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|pretrained_model\.|base_model\.model\.)+")
INSIDE = re.compile(r"\.(?:modules_to_save(?:\.default)?|original_module|base_layer)(?=\.)")
LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
# Keys of an adapter's configuration that change what it computes, with the values that are plain LoRA.
PLAIN_LORA: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}

Reader = Callable[[], torch.Tensor]


class StoredWeights:
    """Weights by their names without wrappers, each read from its file when it is asked for.

    `readers` are whole weights; `lora` are the A and B of linear layers, by the layers' names. A safetensors file
    stays open, and a torch file is read whole.
    """

    def __init__(self, *files: Path) -> None:
        self.readers: dict[str, Reader] = {}
        self.lora: dict[str, dict[str, Reader]] = {}
        for file in files:
            self.add(file)

    def add(self, file: Path) -> None:
        """Add the weights of a file."""
        for stored, read in _readers(file).items():
            name = INSIDE.sub("", NAME_WRAPPERS.sub("", stored))
            if ".original_module." in stored:
                continue  # what `modules_to_save` replaced
            if match := LORA.fullmatch(name):
                self.lora.setdefault(match["module"], {})[match["part"]] = read
            elif "lora_" in name:
                raise CheckpointError(f"{name} is no LoRA weight of a linear layer: merge the adapter with peft.")
            elif name in self.readers:
                raise CheckpointError(f"{file} has {name} a second time: leave one file of the two in the folder.")
            else:
                self.readers[name] = read


def read_language_head(path: str | Path, config: Any, revision: str | None = None) -> Tensor:
    """Return the head [V, H] of the language model at `path`, whose configuration is `config`."""
    text = config.get_text_config()
    scaled = [it for it in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(text, it, None)]
    if scaled:
        raise ConfigError(f"critique_weight: {path} has {scaled[0]}, which is not learned by: remove the key.")
    readers = StoredWeights(*weight_files(local_copy(path, revision))).readers
    tied = getattr(text, "tie_word_embeddings", False) or config.tie_word_embeddings
    for end in ("lm_head.weight", *(["embed_tokens.weight"] if tied else [])):
        if name := next((it for it in readers if it.endswith(end)), None):
            return readers[name]()
    raise CheckpointError(f"critique_weight: {path} has no language head: start from a model that writes.")


def _readers(file: Path) -> dict[str, Reader]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: copy the checkpoint again.")
    if is_torch_file(file):
        tensors = plain_weights(file, read_weight_file(file), keep_type=True)
        return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}
    try:
        stored = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({first_line(error)}): copy it again.") from error
    return {name: lambda name=name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def with_lora(name: str, weight: Reader, parts: Mapping[str, Reader], scale: float) -> Reader:
    """Return the reader of W + scale · BA, in the type of W."""
    if parts.keys() != {"A", "B"}:
        raise CheckpointError(f"{name} has lora_{min(parts)} alone: copy the adapter again.")

    def merged() -> torch.Tensor:
        base, down, up = weight(), parts["A"](), parts["B"]()
        if base.shape != (len(up), down.shape[1]):
            raise CheckpointError(
                f"{name} of the base is {list(base.shape)}, and the adapter's {[len(up), down.shape[1]]}: name the "
                "model that the adapter was trained on by --base."
            )
        return lora_merged(base, down, up, scale)

    return merged


def local_copy(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder or file on this machine of a folder, file or hub repository, fetched where it must be.

    Of a repository's weights only those are fetched that are read, not the same in further formats.
    """
    if Path(source).exists():
        return Path(source)
    unread: list[str] = []
    if hub_answers():
        read = {*head_files(source, revision)}
        read.update(ADAPTERS if is_adapter(source, revision) else weight_names(source, revision))
        stored = [name for name in file_names(source, revision) if PurePath(name).suffix in SUFFIXES]
        unread = [name for name in stored if name not in read]
    return hub_snapshot(source, revision, ignore_patterns=unread)


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model's weights, without separate heads and adapters; an indexed shard may be missing."""
    if path.is_file():
        return [path]
    files = [path / name for name in weight_names(path)]
    if not files:
        raise CheckpointError(f"{path} has no weights ({', '.join(SUFFIXES)}): check the path.")
    if len(files) > 1 and not any((path / name).is_file() for name in INDICES):
        raise CheckpointError(f"{path} has {len(files)} weight files and no index: name one, such as {files[0]}.")
    return files


def read_adapter(path: Path) -> tuple[StoredWeights, float]:
    """Return the weights of an adapter, and the scale of its BA."""
    settings = read_json_of(path, ADAPTER_CONFIG) or {}
    for key, plain in PLAIN_LORA.items():
        if settings.get(key) not in plain:
            raise CheckpointError(
                f"{path} is an adapter with {key}: {settings.get(key)!r}, which is not carried: merge it with peft, "
                "and import the merged model."
            )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
        raise CheckpointError(
            f"{ADAPTER_CONFIG} of {path} has r: {rank!r} and lora_alpha: {alpha!r}, which are no numbers: copy it "
            "again."
        )
    file = next((path / name for name in ADAPTERS if (path / name).is_file()), path / ADAPTERS[0])
    return StoredWeights(file), lora_scale(rank, alpha, settings.get("use_rslora"))

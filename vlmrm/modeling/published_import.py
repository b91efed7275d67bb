"""`vlmrm import`: a reward model that others have trained and published, as a full checkpoint of ours.

Weights go from file to file, one at a time and in the type in which they are stored; no model is loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import make_folder, read_wording, require_new_folder, write_json
from vlmrm.modeling.checkpoint import load_processor, read_config
from vlmrm.modeling.manifest import (
    ADAPTER_CONFIG,
    REWARD_FILE,
    find_file,
    provenance,
    read_json_of,
    save_reward_files,
    write_complete,
)
from vlmrm.modeling.published_heads import chosen_output, convert_head
from vlmrm.modeling.published_layouts import HEAD_WEIGHTS, PublishedLayout, find_layout, named_layout
from vlmrm.modeling.published_names import Naming
from vlmrm.modeling.published_source import (
    Reader,
    StoredWeights,
    head_files,
    local_copy,
    read_adapter,
    weight_files,
)
from vlmrm.modeling.published_template import question_template, turn_of
from vlmrm.modeling.published_weights import lora_scale
from vlmrm.modeling.reward_model import reward_model_class

SHARD = 4 * 2**30  # bytes, at most held in memory
EMBEDDINGS = "embed_tokens.weight"


@dataclass(frozen=True)
class ImportedModel:
    """What was imported: the folder, the layout that was recognised, and the output."""

    folder: Path
    layout: str
    output_name: str


def import_reward(
    source: str | Path,
    output_folder: str | Path,
    *,
    layout: str | None = None,
    base: str | Path | None = None,
    output_name: str | None = None,
    template: str | Path | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ImportedModel:
    """Write a published reward model as a full checkpoint that scores by its authors' formula and trains further.

    Args:
        source: folder, weight file or hub repository.
        layout: one of `published_layouts.LAYOUTS`; default: by the names of the source and its weights.
        base: folder or repository of the weights that an adapter was trained on, or of the configuration and processor
            of a source without them.
        output_name: which of several outputs.
        template: file of the authors' instruction, where they have one.
        min_pixels, max_pixels: limits on the area of images; default: those of the layout, or the processor.
    """
    output_folder = Path(output_folder)
    require_new_folder(output_folder, "the imported model")
    named = named_layout(source, layout)
    if named is not None:  # before anything is fetched
        _check_options(named, output_name, template)
    opened = _open(source, base, named, revision)
    form = opened.layout
    chosen = _check_options(form, output_name, template)
    settings = _settings(form, opened.folder)
    config = read_config(opened.described, None, trust_remote_code)
    if form.model_types and config.model_type not in form.model_types:
        raise CheckpointError(
            f"{opened.described} is a {config.model_type}, and {form.name} is a {' or '.join(form.model_types)}: name "
            "the model that it was trained from by --base, or its own --layout."
        )
    processor = _processor(opened, trust_remote_code)
    _set_template(processor, form, chosen, template)
    limits = min_pixels or form.pixels, max_pixels or form.pixels
    _limit_pixels(processor, *limits)
    _fit_vocabulary(config, processor, form, opened.weights.readers)
    head = _set_head(config, opened, chosen)
    model = _skeleton(config)
    weights = _backbone(Naming(model, form, source), opened, _scale(settings)) | head
    mean, std = _normalization(settings, chosen)
    make_folder(output_folder)
    with TemporaryDirectory(dir=output_folder.resolve().parent, prefix=f".{output_folder.name}-") as unfinished:
        made = Path(unfinished, "model")
        make_folder(made)
        model.config.dtype = _write_weights(made, weights)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(made)
        save_reward_files(
            made,
            processor=processor,
            head=config.reward_head,
            shown={"min_pixels": limits[0], "max_pixels": limits[1]},
            reward_mean=mean,
            reward_std=std,
            provenance=provenance(
                {
                    "imported_from": str(source),
                    "revision": revision,
                    "base_model": None if base is None else str(base),
                    "layout": form.name,
                    "output": chosen,
                    "formula": form.source,
                }
            ),
        )
        write_complete(made, world_size=1, step=None)
        os.replace(made, output_folder)  # an empty folder gives way
    return ImportedModel(output_folder, form.name, chosen)


@dataclass(frozen=True)
class Opened:
    """A published model: its weights and those of its adapter, with the scale of BA, and those that have its head.

    `described` is the folder or repository of its configuration.
    """

    folder: Path
    layout: PublishedLayout
    weights: StoredWeights
    adapter: StoredWeights
    scale: float | None
    heads: Mapping[str, Reader]
    described: str | Path


def _check_options(layout: PublishedLayout, output_name: str | None, template: str | Path | None) -> str:
    """Return the name of the output to import."""
    chosen = chosen_output(layout, output_name)
    if layout.question and template is None:
        raise ConfigError(
            f"{layout.name} is asked by an instruction of its authors: save it as a text with "
            f"{' and '.join(layout.question)} where those go, and name it by --template."
        )
    if template is not None and not layout.question:
        raise ConfigError(f"{layout.name} is read through its chat template: leave --template out.")
    return chosen


def _open(source: str | Path, base: str | Path | None, named: PublishedLayout | None, revision: str | None) -> Opened:
    if not Path(source).is_file() and find_file(source, REWARD_FILE, revision) is not None:
        raise CheckpointError(f"{source} is a reward model of vlmrm already: open it as it is.")
    path = local_copy(source, revision)
    folder = path if path.is_dir() else path.parent
    adapted = (folder / ADAPTER_CONFIG).is_file()
    if adapted and base is None:
        base = (read_json_of(folder, ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        if not base:
            raise CheckpointError(f"{source} is an adapter: name the model that it was trained on by --base.")
    adapter, scale = read_adapter(folder) if adapted else (StoredWeights(), None)
    weights = StoredWeights(*weight_files(local_copy(base) if adapted and base else path))
    separate = StoredWeights()
    if path.is_dir():  # LLaMA-Factory may leave both forms of one head
        separate = StoredWeights(*(path / name for name in head_files(path)[:1]))
    trained = adapter.readers | separate.readers
    form = find_layout(source, trained if any(map(HEAD_WEIGHTS.search, trained)) else weights.readers, named)
    heads = trained if any(map(form.matches, trained)) else weights.readers
    if heads is trained and not adapted and (second := next(filter(form.matches, weights.readers), None)):
        raise CheckpointError(
            f"{source} has a head in a file of its own and {second} beside it: leave one of the two."
        )
    # The base comes first where it is named: a source may have a configuration that transformers does not know.
    described = base or (folder if (folder / "config.json").is_file() and not form.renamed else form.base)
    if described is None:
        raise CheckpointError(f"{source} has no config.json: name the model that it was trained from by --base.")
    return Opened(folder, form, weights, adapter, scale, heads, described)


def _set_head(config: PreTrainedConfig, opened: Opened, output_name: str) -> dict[str, Reader]:
    """Describe the head in the configuration, and return its weights."""
    width = config.get_text_config().hidden_size
    head, weights = convert_head(opened.layout, output_name, opened.heads, lambda name: opened.heads[name](), width)
    config.reward_head = head.described(width)
    if opened.layout.text_positions:
        config.reward_positions = "text"
    return {name: lambda tensor=tensor: tensor for name, tensor in weights.items()}


def _backbone(naming: Naming, opened: Opened, scale: float | None) -> dict[str, Reader]:
    """Return the weights of the backbone by the names of the new file, with those of LoRA merged."""
    named = naming.backbone_weights(opened.weights.readers)
    named |= naming.renamed(opened.adapter.readers)
    named |= naming.merged(named, opened.weights.lora, scale)
    return named | naming.merged(named, opened.adapter.lora, opened.scale)


def _skeleton(config: PreTrainedConfig) -> Any:
    """Return the reward model without weights."""
    with init_empty_weights(include_buffers=False):
        return reward_model_class(config)(config)


def _settings(layout: PublishedLayout, folder: Path) -> dict[str, Any]:
    """Return the content of the layout's file of settings; empty for one without."""
    if layout.settings is None:
        return {}
    settings = read_json_of(folder, layout.settings)
    if settings is None:
        raise CheckpointError(f"there is no {layout.settings} in {folder}: name the folder or repository that has it.")
    return settings


def _scale(settings: Mapping[str, Any]) -> float | None:
    """Return the scale of the LoRA weights in a file of weights; None where the settings name none."""
    lora = settings.get("peft_lora_config") or {}
    if "lora_r" not in lora or "lora_alpha" not in lora:
        return None
    return lora_scale(lora["lora_r"], lora["lora_alpha"], lora.get("use_rslora"))


def _normalization(settings: Mapping[str, Any], output_name: str) -> tuple[float | None, float | None]:
    """Return mean and standard deviation of an output, where the settings have them."""
    norm = settings.get("inference_config") or {}
    return norm.get(f"{output_name}_mean"), norm.get(f"{output_name}_std")


def _processor(opened: Opened, trust_remote_code: bool) -> Any:
    """Return the processor of the source, or of the base, with the reward tokens."""
    files = ("processor_config.json", "preprocessor_config.json")
    # Under other names of weights the files are of another program, LLaVA's.
    has_one = not opened.layout.renamed and any((opened.folder / name).is_file() for name in files)
    described = opened.folder if has_one else opened.described
    processor: Any = load_processor(described, trust_remote_code=trust_remote_code)
    if tokens := opened.layout.tokens:
        # The list is what is new; tokens that are special already stay so.
        processor.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return processor


def _set_template(processor: Any, layout: PublishedLayout, output_name: str, path: str | Path | None) -> None:
    """Give the processor the chat template that writes the authors' instruction, if they have one."""
    if path is None:
        return
    token = layout.outputs[output_name].token
    text = read_wording(path, f"--template {path}", *layout.question, *([token] if token else []))
    instruction = text[: text.index(token) + len(token)] if token else text
    turn = layout.turn(processor) if layout.turn else turn_of(processor)
    processor.chat_template = question_template(turn, instruction, layout.question, token)


def _limit_pixels(processor: Any, least: int | None, most: int | None) -> None:
    """Put the limits on the area of images into the processor, so that training keeps them too."""
    if least is None and most is None:
        return
    size = dict(processor.image_processor.size)
    if not {"shortest_edge", "longest_edge"} <= size.keys():
        raise ConfigError(
            f"{type(processor).__name__} does not size images by area: leave --min-pixels and --max-pixels out."
        )
    limits = {"shortest_edge": least, "longest_edge": most}
    processor.image_processor.size = size | {name: area for name, area in limits.items() if area is not None}


def _fit_vocabulary(
    config: PreTrainedConfig, processor: Any, layout: PublishedLayout, weights: Mapping[str, Reader]
) -> None:
    """Let the weights decide the size of the vocabulary of a model with reward tokens."""
    if not layout.tokens:
        return
    name = next((name for name in weights if name.endswith(EMBEDDINGS)), None)
    if name is None:
        raise CheckpointError(f"there is no {EMBEDDINGS} among the weights: copy the checkpoint again.")
    rows = len(weights[name]())
    config.get_text_config().vocab_size = rows
    ids = processor.tokenizer.convert_tokens_to_ids(layout.tokens)
    if max(ids) >= rows:
        raise CheckpointError(
            f"the embeddings have {rows} rows, and none for {layout.tokens[-1]}: name the model that it was trained "
            "from by --base."
        )


def _write_weights(folder: Path, weights: Mapping[str, Reader]) -> torch.dtype:
    """Write the weights in shards with their index; return the type of most of the backbone."""
    shards: list[list[str]] = []
    types: Counter[torch.dtype] = Counter()
    total = 0
    for shard in _shards(weights):
        save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        for name, tensor in shard.items():
            total += tensor.nbytes
            types[tensor.dtype] += tensor.numel() if name.startswith("model.") else 0
    files = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for index, file in enumerate(files):
        os.replace(folder / f"shard-{index}", folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    return types.most_common(1)[0][0]


def _shards(weights: Mapping[str, Reader]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in groups of about `SHARD` bytes, each read when its group is made."""
    shard: dict[str, torch.Tensor] = {}
    for name, read in weights.items():
        tensor = read()
        if shard and sum(weight.nbytes for weight in shard.values()) + tensor.nbytes > SHARD:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    yield shard

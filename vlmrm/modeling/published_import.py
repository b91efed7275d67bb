"""`vlmrm import`: a reward model that others have trained and published, as a full checkpoint of ours.

Weights go from file to file, one at a time and in the type in which they are stored; no model is loaded.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import PreTrainedConfig, conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightRenaming

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import make_folder, require_new_folder, write_json
from vlmrm.libraries import relies_on
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
from vlmrm.modeling.published_layouts import HEAD_WEIGHTS, Layout, find_layout
from vlmrm.modeling.published_source import (
    Reader,
    StoredWeights,
    head_files,
    local_copy,
    lora_scale,
    read_adapter,
    weight_files,
    with_lora,
)
from vlmrm.modeling.published_template import question_template, read_instruction, turn_of
from vlmrm.modeling.reward_model import RewardModel, reward_model_class

relies_on(conversion_mapping.get_model_conversion_mapping, "model")
relies_on(
    core_model_loading.rename_source_key,
    "weight_renamings",
    "weight_converters",
    "base_model_prefix",
    "meta_state_dict",
)

SHARD = 4 * 2**30  # bytes, at most held in memory
EMBEDDINGS = "embed_tokens.weight"
NOT_READ = re.compile(r"(^|\.)lm_head\.")  # of a language head, for which there is no use


@dataclass(frozen=True)
class Imported:
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
) -> Imported:
    """Write a published reward model as a full checkpoint that scores by its authors' formula and trains further.

    Args:
        source: folder, weight file or hub repository.
        layout: one of `published_layouts.LAYOUTS`; default: by the names of the source and its weights.
        base: folder or repository of the weights that an adapter was trained on, or of the configuration and processor
            of a source without them.
        output_name: which of several outputs.
        template: file of the authors' instruction, where they have one.
        min_pixels, max_pixels: limits on the area of images; default: those of the layout, or the processor.

    Raises:
        ConfigError: when the output folder has something in it, or an option is missing or does not fit.
        CheckpointError: when the source cannot be read, or is of a layout that cannot be carried.
    """
    output_folder = Path(output_folder)
    require_new_folder(output_folder, "the imported model")
    if find_file_of(source, REWARD_FILE):
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
    separate = StoredWeights(*head_files(path)[:1])  # LLaMA-Factory may leave both forms of one head
    trained = adapter.readers | separate.readers
    form = find_layout(source, trained if any(map(HEAD_WEIGHTS.search, trained)) else weights.readers, layout)
    heads = trained if any(map(form.matches, trained)) else weights.readers
    chosen = chosen_output(form, output_name)
    settings = _settings(form, folder)
    # The base comes first where it is named: a source may have a configuration that transformers does not know.
    described = base or (folder if (folder / "config.json").is_file() else form.base)
    if described is None:
        raise CheckpointError(f"{source} has no config.json: name the model that it was trained from by --base.")
    config = read_config(described, None, trust_remote_code)
    processor = _processor(folder, described, form, trust_remote_code)
    _set_template(processor, form, chosen, template)
    _fit_vocabulary(config, processor, form, weights.readers)
    width = config.get_text_config().hidden_size
    head, head_weights = convert_head(form, chosen, heads, lambda name: heads[name](), width)
    config.reward_head = head.described(width)
    if form.text_positions:
        config.reward_positions = "text"
    model = _skeleton(config)
    naming = Naming(model, form)
    named = naming.whole(weights.readers, source)
    named |= naming.known(adapter.readers, source)
    named |= naming.merged(named, weights.lora, _scale(settings), source)
    named |= naming.merged(named, adapter.lora, scale, source)
    named |= {name: lambda tensor=tensor: tensor for name, tensor in head_weights.items()}
    make_folder(output_folder)
    with TemporaryDirectory(dir=output_folder.resolve().parent, prefix=f".{output_folder.name}-") as unfinished:
        made = Path(unfinished, "model")
        make_folder(made)
        model.config.dtype = _write_weights(made, named)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(made)
        mean, std = _normalization(settings, chosen)
        save_reward_files(
            made,
            processor=processor,
            head=config.reward_head,
            min_pixels=min_pixels or form.pixels,
            max_pixels=max_pixels or form.pixels,
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
    return Imported(output_folder, form.name, chosen)


class Naming:
    """The names of a backbone's weights in a model without weights, by those under which trainers store them.

    What transformers converts further when it loads them (the experts of a mixture) keeps its stored name.
    """

    def __init__(self, model: RewardModel, layout: Layout):
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        self.renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self.converters: Any = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
        self.prefix = model.base_model_prefix
        self.expected = model.state_dict()
        self.backbone = {name for name in self.expected if name.startswith("model.")}
        self.architecture = type(model).__name__
        self.layout = layout

    def of(self, stored: str) -> tuple[str, str] | None:
        """Return the name in memory and that in the new file; None for a weight of a reward or language head."""
        if self.layout.matches(stored) or NOT_READ.search(stored):
            return None
        name = stored
        for pattern, replacement in self.layout.renamed.items():
            name = re.sub(pattern, replacement, name)
        loaded, converter = core_model_loading.rename_source_key(
            name, self.renamings, self.converters, self.prefix, self.expected
        )
        return loaded, name if converter else loaded

    def known(self, weights: Mapping[str, Reader], source: str | Path) -> dict[str, Reader]:
        """Return weights of the backbone by their names in the new file.

        Raises:
            CheckpointError: when one is there twice, or is not of the backbone.
        """
        named: dict[str, Reader] = {}
        for stored, read in weights.items():
            if (names := self.of(stored)) is None:
                continue
            loaded, name = names
            if loaded not in self.backbone:
                raise CheckpointError(
                    f"{source} has {stored}, which a {self.architecture} has not: it is broken, or of another "
                    "architecture."
                )
            if name in named:
                raise CheckpointError(f"{source} has {name} twice: leave one file of weights in the folder.")
            named[name] = self._checked(name, read)
        return named

    def whole(self, weights: Mapping[str, Reader], source: str | Path) -> dict[str, Reader]:
        """Do `known` with all weights of the backbone.

        Raises:
            CheckpointError: also when one is missing.
        """
        names = map(self.of, weights)
        missing = self.backbone - {loaded for loaded, _ in filter(None, names)}
        if missing:
            raise CheckpointError(
                f"{source} lacks {', '.join(sorted(missing)[:3])}, {len(missing)} weights in all: it is broken, or of "
                f"another architecture than {self.architecture}."
            )
        return self.known(weights, source)

    def merged(
        self,
        named: Mapping[str, Reader],
        lora: Mapping[str, Mapping[str, Reader]],
        scale: float | None,
        source: str | Path,
    ) -> dict[str, Reader]:
        """Return those of the `named` weights that have LoRA weights, with these merged.

        Raises:
            CheckpointError: when there is no such weight, or the scale is unknown.
        """
        if lora and scale is None:
            raise CheckpointError(
                f"{source} has LoRA weights of {min(lora)} and nothing that says their scale: merge them with peft."
            )
        merged: dict[str, Reader] = {}
        for module, parts in lora.items():
            names = self.of(f"{module}.weight")
            if names is None:
                continue  # of a language head, for which there is no use
            if names[1] not in named:
                raise CheckpointError(
                    f"{source} has LoRA weights of {module}, which its base has not: name the model that it was "
                    "trained on by --base."
                )
            merged[names[1]] = with_lora(names[1], named[names[1]], parts, scale or 0.0)
        return merged

    def _checked(self, name: str, read: Reader) -> Reader:
        def checked() -> torch.Tensor:
            tensor = read()
            if name in self.expected and tensor.shape != self.expected[name].shape:
                raise CheckpointError(
                    f"{name} is {list(tensor.shape)}, and by the configuration {list(self.expected[name].shape)}: "
                    "name the model that it was trained from by --base."
                )
            return tensor

        return checked


def find_file_of(source: str | Path, name: str) -> Path | None:
    """Return a file of a folder or repository; None where there is none, or the source is a file."""
    return None if Path(source).is_file() else find_file(source, name)


def _skeleton(config: PreTrainedConfig) -> Any:
    """Return the reward model without weights."""
    with init_empty_weights(include_buffers=False):
        return reward_model_class(config)(config)


def _settings(layout: Layout, folder: Path) -> dict[str, Any]:
    """Return the content of the layout's file of settings; empty for one without.

    Raises:
        CheckpointError: when it is missing.
    """
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


def _processor(folder: Path, described: str | Path, layout: Layout, trust_remote_code: bool) -> Any:
    """Return the processor of the source, or of the base, with the reward tokens."""
    files = ("processor_config.json", "preprocessor_config.json")
    has_one = not layout.renamed and any((folder / name).is_file() for name in files)
    processor: Any = load_processor(folder if has_one else described, trust_remote_code=trust_remote_code)
    if layout.tokens:
        # The list is what is new; tokens that are special already stay so.
        processor.tokenizer.add_special_tokens({"additional_special_tokens": layout.tokens})
    return processor


def _set_template(processor: Any, layout: Layout, output_name: str, path: str | Path | None) -> None:
    """Give the processor the chat template that writes the authors' instruction.

    Raises:
        ConfigError: when the instruction is missing, or there is none in this layout.
    """
    if bool(layout.question) != (path is not None):
        raise ConfigError(
            f"a {layout.name} is asked by an instruction of its authors: save it as a text with "
            f"{' and '.join(layout.question)} where those go, and name it by --template."
            if layout.question
            else f"a {layout.name} is read through its chat template: leave --template out."
        )
    if path is None:
        return
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template {path} cannot be read ({error}): check it.") from error
    token = layout.outputs[output_name].token
    instruction = read_instruction(text, layout.question, token, str(path))
    turn = layout.turn(processor) if layout.turn else turn_of(processor)
    processor.chat_template = question_template(turn, instruction, layout.question, token)


def _fit_vocabulary(config: PreTrainedConfig, processor: Any, layout: Layout, weights: Mapping[str, Reader]) -> None:
    """Let the weights decide the size of the vocabulary of a model with reward tokens.

    Raises:
        CheckpointError: when they have no row for one of these.
    """
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
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > SHARD:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    yield shard

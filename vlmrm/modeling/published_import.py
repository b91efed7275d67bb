"""`vlmrm import`: a reward model that others have trained and published, as a full checkpoint of ours.

Weights go from file to file, one at a time and in the type in which they are stored; no model is loaded.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import PreTrainedConfig, conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightRenaming

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import make_folder, read_wording, require_new_folder, write_json
from vlmrm.libraries import relies_on
from vlmrm.modeling.checkpoint import load_processor, read_config
from vlmrm.modeling.head import Head
from vlmrm.modeling.manifest import (
    ADAPTER_CONFIG,
    HEAD_WEIGHTS,
    REWARD_FILE,
    find_file,
    head_files,
    provenance,
    read_json_of,
    save_reward_files,
    write_complete,
)
from vlmrm.modeling.published_layouts import (
    PROMPT,
    PublishedLayout,
    find_layout,
    frames_template,
    named_layout,
    question_template,
)
from vlmrm.modeling.published_weights import (
    Reader,
    StoredWeights,
    local_copy,
    lora_scale,
    read_adapter,
    weight_files,
    with_lora,
)
from vlmrm.modeling.reward_model import RewardModel, reward_model_class
from vlmrm.outputs import Outputs
from vlmrm.rendering import limited_size

SHARD = 4 * 2**30  # bytes, at most held in memory
NAME = "{output}"  # stands for the name of an output in --template
EMBEDDINGS = "embed_tokens.weight"


@dataclass(frozen=True)
class ImportedModel:
    """What was imported: the folder, the layout that was recognised, and what the model answers."""

    folder: Path
    layout: str
    outputs: Outputs


def import_reward(
    source: str | Path,
    output_folder: str | Path,
    *,
    layout: str | None = None,
    base: str | Path | None = None,
    template: str | Path | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ImportedModel:
    """Write a published reward model as a full checkpoint that scores by its authors' formula and trains further.

    The arguments are the options of `vlmrm import`.
    """
    output_folder = Path(output_folder)
    require_new_folder(output_folder, "the imported model")
    named = named_layout(source, layout)
    if named is not None:  # before anything is fetched
        _check_options(named, template)
    opened = _open(source, base, named, revision)
    form = opened.layout
    _check_options(form, template)
    settings = (read_json_of(opened.folder, form.settings) if form.settings else {}) or {}
    if form.settings and not settings:
        raise CheckpointError(
            f"there is no {form.settings} in {opened.folder}: name the folder or repository that has it."
        )
    config = read_config(opened.described, None, trust_remote_code)
    if form.model_types and config.model_type not in form.model_types:
        raise CheckpointError(
            f"{opened.described} is a {config.model_type}, and {form.name} is a {' or '.join(form.model_types)}: name "
            "the model that it was trained from by --base, or its own --layout."
        )
    processor = _processor(opened, trust_remote_code)
    if template is not None:
        _set_template(processor, form, template)
    limits = min_pixels or form.least_pixels or form.pixels, max_pixels or form.pixels
    if limits != (None, None):  # in the processor, so that training keeps them too
        processor.image_processor.size = limited_size(processor, *limits)
    _fit_vocabulary(config, processor, form, opened.weights.readers)
    head = _set_head(config, opened, settings.get("inference_config") or {})
    with init_empty_weights(include_buffers=False):
        model: Any = reward_model_class(config)(config)
    naming, lora = Naming(model, form, source), settings.get("peft_lora_config") or {}
    scale = None  # of LoRA weights in a file of weights
    if "lora_r" in lora and "lora_alpha" in lora:
        scale = lora_scale(lora["lora_r"], lora["lora_alpha"], lora.get("use_rslora"))
    weights = naming.backbone_weights(opened.weights.readers)
    weights |= naming.renamed(opened.adapter.readers)
    weights |= naming.merged(weights, opened.weights.lora, scale)
    weights |= naming.merged(weights, opened.adapter.lora, opened.scale)
    make_folder(output_folder)
    with TemporaryDirectory(dir=output_folder.resolve().parent, prefix=f".{output_folder.name}-") as unfinished:
        made = Path(unfinished, "model")
        make_folder(made)
        model.config.dtype = _write_weights(made, weights | head)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(made)
        save_reward_files(
            made,
            processor=processor,
            head=config.reward_head,
            shown={"min_pixels": limits[0], "max_pixels": limits[1]},
            outputs=form.outputs,
            provenance=provenance(
                {
                    "imported_from": str(source),
                    "revision": revision,
                    "base_model": None if base is None else str(base),
                    "layout": form.name,
                    "formula": form.source,
                }
            ),
        )
        write_complete(made, world_size=1, step=None)
        os.replace(made, output_folder)  # an empty folder gives way
    return ImportedModel(output_folder, form.name, form.outputs)


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


def _check_options(layout: PublishedLayout, template: str | Path | None) -> None:
    if layout.places and template is None:
        raise ConfigError(
            f"{layout.name} is asked by an instruction of its authors: save it as a text with {PROMPT} where that "
            "goes, and name it by --template."
        )
    if template is not None and not layout.places:
        raise ConfigError(f"{layout.name} is read through its chat template: leave --template out.")
    if min(len(layout.heads), len(layout.outputs.branches)) > 1 and NAME not in str(template):
        raise ConfigError(
            f"{layout.name} has an instruction for each of {', '.join(layout.outputs.names)}: write {NAME} in "
            "--template where the names of their files differ."
        )


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
    described = base or (folder if (folder / "config.json").is_file() else form.base)
    if described is None:
        raise CheckpointError(f"{source} has no config.json: name the model that it was trained from by --base.")
    return Opened(folder, form, weights, adapter, scale, heads, described)


def _set_head(config: PreTrainedConfig, opened: Opened, norm: Mapping[str, float]) -> dict[str, Reader]:
    """Describe the head and its outputs in the configuration, and return its weights."""
    width = config.get_text_config().hidden_size
    head, weights = convert_head(opened.layout, opened.heads, lambda name: opened.heads[name](), width, norm)
    config.reward_head = head.described(width)
    if (described := opened.layout.outputs.described()) is not None:
        config.reward_outputs = described
    if opened.layout.text_positions:
        config.reward_positions = "text"
    return {name: lambda tensor=tensor: tensor for name, tensor in weights.items()}


def _processor(opened: Opened, trust_remote_code: bool) -> Any:
    """Return the processor of the source, or of the base, with the reward tokens."""
    files = ("processor_config.json", "preprocessor_config.json")
    has_one = any((opened.folder / name).is_file() for name in files)
    described = opened.folder if has_one else opened.described
    processor: Any = load_processor(described, trust_remote_code=trust_remote_code)
    if tokens := opened.layout.tokens:
        # The list is what is new; tokens that are special already stay so.
        processor.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return processor


def _set_template(processor: Any, layout: PublishedLayout, template: str | Path) -> None:
    """Give the processor the chat template that writes the authors' instruction of each output, up to its token."""
    if layout.frames:
        text = read_wording(template, f"--template {template}", PROMPT)
        processor.chat_template = frames_template(processor, text, layout.tokens[-1])
        return
    instructions = {}
    for name, place in layout.places.items():
        path = str(template).replace(NAME, name)
        text = read_wording(path, f"--template {path}", PROMPT, place.token)
        instructions[name] = text[: text.index(place.token) + len(place.token)]
    processor.chat_template = question_template(processor, instructions)


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


# Heads ---------------------------------------------------------------------------------------------------------------


# The weight and the bias of each linear layer, in order.
Layers = list[tuple[torch.Tensor, torch.Tensor | None]]


def convert_head(
    layout: PublishedLayout,
    names: Iterable[str],
    read: Callable[[str], Any],
    width: int,
    norm: Mapping[str, float] | None = None,
) -> tuple[Head, dict[str, torch.Tensor]]:
    """Return a published head over hidden states of `width` channels, and its weights by our names, float32.

    Several heads become one of as many blocks. A layer that gives one number at each of several tokens has a row for
    each output. By `norm` a number becomes (number - mean) / std, as its authors give it.
    """
    names, outputs = list(names), layout.outputs
    *each, (last, bias) = _side_by_side([_layers(layout, head, names, read) for head in layout.heads])
    layers, norms = ([layer for layer in each if layer[0].ndim == dimensions] for dimensions in (2, 1))
    if len(last) == 1:
        last = last.repeat(len(outputs), 1)
        bias = None if bias is None else bias.repeat(len(outputs))
    if len(last) != outputs.columns:
        raise CheckpointError(f"the head gives {len(last)} numbers, and that of {layout.name} {outputs.columns}.")
    if layers and layout.activation is None:
        raise CheckpointError(f"the head has {len(layers) + 1} layers, and {layout.name} has one: name its --layout.")
    if norm:
        mean, std = (torch.tensor([norm[f"{name}_{it}"] for name in outputs.names]) for it in ("mean", "std"))
        last, bias = last.float() / std[:, None], ((0.0 if bias is None else bias.float()) - mean) / std
    count, hidden = len(layout.heads), [len(weight) for weight, _ in layers]
    head = Head(hidden, layout.activation or "silu", bias is not None, count, groups=count if norms else 0)
    weights = {"score.weight": last} | ({} if bias is None else {"score.bias": bias})
    for place, of_kind in enumerate((layers, norms)):
        for index, (weight, hidden_bias) in enumerate(of_kind):
            name = f"score_hidden.{index * (3 if norms else 2) + place}"
            weights[f"{name}.weight"] = weight
            weights[f"{name}.bias"] = torch.zeros(len(weight)) if hidden_bias is None else hidden_bias
    widths = pairwise([width, *hidden, outputs.columns])
    for (weight, _), (before, after) in zip([*layers, (last, bias)], widths, strict=True):
        if weight.shape != (after, before):
            raise CheckpointError(
                f"a layer of the head is {list(weight.shape)} and should be {[after, before]}: the file is broken, or "
                "--base another model."
            )
    return head, {name: weight.float().contiguous() for name, weight in weights.items()}


def _side_by_side(heads: Sequence[Layers]) -> Layers:
    """Return the layers of several heads as those of one: the first over the same states, the others in blocks."""
    if len(heads) == 1:
        return list(heads[0])
    return [
        (
            torch.cat([weight for weight, _ in each])
            if number == 0 or each[0][0].ndim == 1
            else torch.block_diag(*(weight for weight, _ in each)),
            torch.cat([bias for _, bias in each if bias is not None]),
        )
        for number, each in enumerate(zip(*heads, strict=True))
    ]


def _layers(layout: PublishedLayout, head: str | None, names: Sequence[str], read: Callable[[str], Any]) -> Layers:
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name in names:
        if match := layout.matches(name):
            groups: Mapping[str, str | None] = match.groupdict()
            if groups.get("head") == head:
                layers.setdefault(int(groups.get("layer") or 0), {})[groups["kind"] or ""] = read(name)
    if not layers:
        raise CheckpointError(f"the weights of {head} are missing: copy the checkpoint again.")
    if missing := [layer for layer in layout.layers if layer not in map(str, layers)]:
        raise CheckpointError(f"layer {missing[0]} of the head is missing: copy the checkpoint again.")
    for layer, tensors in layers.items():
        weight = tensors.get("weight")
        complete = (
            weight is not None
            and weight.ndim == (1 if str(layer) in layout.norms else 2)
            and all(len(tensor) == len(weight) for tensor in tensors.values())
        )
        if not complete or layout.bias not in (None, "bias" in tensors):
            raise CheckpointError(f"layer {layer} of the head is incomplete: copy the checkpoint again.")
    return [(layers[layer]["weight"], layers[layer].get("bias")) for layer in sorted(layers)]


# Names ---------------------------------------------------------------------------------------------------------------


relies_on(conversion_mapping.get_model_conversion_mapping, "model")
relies_on(
    core_model_loading.rename_source_key,
    *("weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"),
)

# Of a language head, for which there is no use, and constants that older versions stored.
NOT_READ = re.compile(r"(^|\.)lm_head\.|\.rotary_emb\.inv_freq$")


class Naming:
    """Map stored names of a backbone's weights to names in a `model`; the model may have no weights yet.

    Weights that transformers converts further on loading (the experts of a mixture) keep their stored names.
    """

    def __init__(self, model: RewardModel, layout: PublishedLayout, source: str | Path):
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        self.renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self.converters: Any = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
        self.prefix = model.base_model_prefix
        self.expected = model.state_dict()
        self.backbone = {name for name in self.expected if name.startswith("model.")}
        self.architecture = type(model).__name__
        self.layout = layout
        self.source = source

    def of(self, stored: str) -> tuple[str, str] | None:
        """Return the name in memory and that in the new file; None for a weight of a reward or language head."""
        if self.layout.matches(stored) or NOT_READ.search(stored) or re.fullmatch(self.layout.unread, stored):
            return None
        loaded, converter = core_model_loading.rename_source_key(
            stored, self.renamings, self.converters, self.prefix, self.expected
        )
        if NOT_READ.search(loaded):
            return None
        return loaded, stored if converter else loaded

    def renamed(self, weights: Mapping[str, Reader]) -> dict[str, Reader]:
        """Return weights of the backbone by their names in the new file."""
        named: dict[str, Reader] = {}
        for stored, read in weights.items():
            if (names := self.of(stored)) is None:
                continue
            loaded, name = names
            if loaded not in self.backbone:
                raise CheckpointError(
                    f"{self.source} has {stored}, which a {self.architecture} has not: it is broken, or of another "
                    "architecture."
                )
            if name in named:
                raise CheckpointError(f"{self.source} has {name} twice: leave one file of weights in the folder.")
            named[name] = self._checked(name, read)
        return named

    def backbone_weights(self, weights: Mapping[str, Reader]) -> dict[str, Reader]:
        """Do `renamed` with all weights of the backbone."""
        names = [*filter(None, map(self.of, weights))]
        missing = self.backbone - {loaded for loaded, _ in names}
        # One stored weight may become several in memory, and then loading it says what is missing.
        if missing and all(loaded == name for loaded, name in names):
            raise CheckpointError(
                f"{self.source} lacks {', '.join(sorted(missing)[:3])}, {len(missing)} weights in all: it is broken, "
                f"or of another architecture than {self.architecture}."
            )
        return self.renamed(weights)

    def merged(
        self, named: Mapping[str, Reader], lora: Mapping[str, Mapping[str, Reader]], scale: float | None
    ) -> dict[str, Reader]:
        """Return those of the `named` weights that have LoRA weights, with these merged."""
        if lora and scale is None:
            raise CheckpointError(
                f"{self.source} has LoRA weights of {min(lora)} and nothing that says their scale: merge them with "
                "peft."
            )
        merged: dict[str, Reader] = {}
        for module, parts in lora.items():
            names = self.of(f"{module}.weight")
            if names is None:
                continue  # of a language head, for which there is no use
            if names[1] not in named:
                raise CheckpointError(
                    f"{self.source} has LoRA weights of {module}, which its base has not: name the model that it was "
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

"""Tiny random checkpoints in the layouts of published reward models, with the scores of their authors' arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.families.table import FAMILIES
from vlmrm.modeling.tiny import make_tiny

from . import reference

WIDTH = 128
QUESTION = "Judge the picture. {curly} Prompt - {text_prompt}\nRating: <|Reward|>\nEND\n"
DIMENSIONS = "Judge the video of {text_prompt}\nVQ <|VQ_reward|>, MQ <|MQ_reward|>, TA <|TA_reward|>\nEND\n"
OUTPUTS = ("VQ", "MQ", "TA")


@dataclass(frozen=True)
class Published:
    """A checkpoint as its authors publish it: where it is, how to import it, and what their arithmetic gives.

    `expected` are the scores of `conversations`, and `outputs` the values of a model of several by their names;
    `options` are those of the import.
    """

    source: Path
    conversations: list[Any]
    expected: torch.Tensor
    options: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """The layout, who publishes so, and a function that writes it."""

    layout: str
    who: str
    write: Callable[[Path], Published]

    @property
    def name(self) -> str:
        return f"{self.layout}: {self.who}"


def noise(*shape: int, seed: int, scale: float = 0.1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def talk(question: str, answer: str, *images: Image.Image) -> reference.Messages:
    parts = [{"type": "image", "image": image} for image in images]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def talks(cell: int) -> list[reference.Messages]:
    """Sides are multiples of a cell, so that no size changes: resizing is the processors', not the formulas'."""
    long, first, second = "This is a handwritten digit, and it is odd, it is seven.", 2 * cell, 3 * cell
    return [
        talk("Which digit is this?", "It is seven.", picture(first, second)),
        talk("Which digit is this?", long, picture(second, first, seed=1)),
        talk("Is seven odd?", "Yes."),
    ]


TALKS, TALKS_16 = talks(28), talks(32)  # patches of Qwen3-VL are 16 wide


def tiny(folder: Path, arch: str) -> tuple[Any, Any]:
    """Processor and language model of a new tiny checkpoint in `folder`."""
    make_tiny(folder, arch)
    return opened(folder)


def opened(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return AutoProcessor.from_pretrained(folder), model.eval()


def old_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of Qwen's weights in transformers 4."""
    pairs = [("model.language_model.", "model."), ("model.visual.", "visual.")]
    for new, old in pairs:
        weights = {old + n.removeprefix(new) if n.startswith(new) else n: w for n, w in weights.items()}
    return {name: weight.clone().contiguous() for name, weight in weights.items()}


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(dict(change(load_file(file))), file, metadata={"format": "pt"})


VALUE = {"v_head.summary.weight": noise(1, WIDTH, seed=1), "v_head.summary.bias": torch.tensor([0.7])}
SCORE = {"score.weight": noise(1, WIDTH, seed=2)}


def skywork(folder: Path) -> Published:
    source = folder / "Skywork-VL-Reward-7B"
    processor, model = tiny(source, "qwen2_5_vl")
    rewritten(source, old_names)
    save_file(VALUE, source / "value_head.safetensors")
    return Published(source, TALKS, reference.value_head(processor, model, VALUE, TALKS))


def llama_factory(folder: Path) -> Published:
    processor, model = tiny(folder / "rm", "qwen3_vl")
    torch.save(VALUE, folder / "rm" / "value_head.bin")
    return Published(folder / "rm", TALKS_16, reference.value_head(processor, model, VALUE, TALKS_16))


def trl_value_head(folder: Path) -> Published:
    """One state dictionary under ZeRO-3: prefixes, the head among the weights, and shards."""
    processor, model = tiny(folder / "rm", "qwen2_vl")
    weights = {f"pretrained_model.{n}": w for n, w in old_names(load_file(folder / "rm/model.safetensors")).items()}
    (folder / "rm/model.safetensors").unlink()
    halves = [dict(list((weights | VALUE).items())[part::2]) for part in range(2)]
    files = [f"model-{part + 1:05}-of-00002.safetensors" for part in range(2)]
    for file, half in zip(files, halves, strict=True):
        save_file(half, folder / "rm" / file)
    index = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "rm/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return Published(folder / "rm", TALKS, reference.value_head(processor, model, VALUE, TALKS))


def ms_swift(folder: Path) -> Published:
    processor, model = tiny(folder / "rm", "qwen2_5_vl")
    rewritten(folder / "rm", lambda weights: without_language_head(old_names(weights)) | SCORE)
    return Published(folder / "rm", TALKS, reference.before_the_padding(processor, model, SCORE, TALKS))


def without_language_head(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if not name.startswith("lm_head")}


def trl_score(folder: Path) -> Published:
    """A `*ForSequenceClassification` of transformers 5, whose names are those in memory."""
    processor, model = tiny(folder / "rm", "qwen2_5_vl")
    rewritten(folder / "rm", lambda weights: without_language_head(weights) | SCORE)
    config = json.loads((folder / "rm/config.json").read_text())
    config |= {"architectures": ["Qwen2_5_VLForSequenceClassification"], "num_labels": 1}
    (folder / "rm/config.json").write_text(json.dumps(config))
    return Published(folder / "rm", TALKS, reference.rightmost_token(processor, model, SCORE, TALKS))


def adapted(folder: Path, *, saved: list[str] | None) -> tuple[Any, Any]:
    """A LoRA adapter of peft's beside its base; the language model that peft computes with it."""
    processor, model = tiny(folder / "base", "qwen2_5_vl")
    model.score = torch.nn.Linear(WIDTH, 1, bias=False)
    model.score.weight.data = SCORE["score.weight"]
    lora = LoraConfig(
        r=4, lora_alpha=16, use_rslora=True, target_modules=r".*language_model.*\.(q_proj|down_proj)",
        modules_to_save=saved, init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = get_peft_model(model, lora).eval()
    model.save_pretrained(folder / "adapter")
    return processor, model


def adapter_score(folder: Path) -> Published:
    processor, model = adapted(folder, saved=["score"])
    expected = reference.before_the_padding(processor, model, SCORE, TALKS)
    return Published(folder / "adapter", TALKS, expected, {"base": folder / "base"})


def adapter_value_head(folder: Path) -> Published:
    processor, model = adapted(folder, saved=None)
    save_file(VALUE, folder / "adapter" / "value_head.safetensors")
    return Published(folder / "adapter", TALKS, reference.value_head(processor, model, VALUE, TALKS))


def base_reward(folder: Path) -> Published:
    processor, model = tiny(folder / "BaseReward", "qwen2_5_vl")
    head = {"score.0.weight": noise(WIDTH, WIDTH, seed=4), "score.0.bias": noise(WIDTH, seed=5)}
    head |= {"score.2.weight": noise(1, WIDTH, seed=6), "score.2.bias": torch.tensor([0.3])}
    rewritten(folder / "BaseReward", lambda weights: weights | head)
    return Published(folder / "BaseReward", TALKS, reference.two_layers(processor, model, head, TALKS))


def another_family(folder: Path) -> Published:
    """`score` in the language model of a LLaVA, where ms-swift puts it, with names of transformers 4."""
    [family] = [family for family in FAMILIES if family.model_type == "llava"]
    processor = family.make_processor()
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(family.make_config(processor), dtype=torch.float32).eval()
    source = folder / "rm"
    processor.save_pretrained(source)
    model.save_pretrained(source)
    head = {"score.weight": noise(1, 64, seed=8, scale=1.0)}

    def older(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        moved = {n.replace("model.language_model.", "language_model.model."): w for n, w in weights.items()}
        moved = {n.removeprefix("model."): w for n, w in moved.items()}
        return without_language_head(moved) | {"language_model.score.weight": head["score.weight"]}

    rewritten(source, older)
    talks = [talk("Which digit?", "It is seven.", picture(28, 28)), talk("Is it odd?", "Yes, it is odd, seven is.")]
    return Published(source, talks, reference.rightmost_token(processor, model, head, talks))


def with_tokens(folder: Path, arch: str, tokens: list[str]) -> tuple[Any, Any, list[int]]:
    processor, model = tiny(folder, arch)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    torch.manual_seed(0)
    model.resize_token_embeddings(len(processor.tokenizer))
    return processor, model, processor.tokenizer.convert_tokens_to_ids(tokens)


def ranknet_weights(name: str, seed: int) -> dict[str, torch.Tensor]:
    sizes = {0: (1024, WIDTH), 3: (16, 1024), 5: (2, 16)}
    weights = {f"{name}.{layer}.weight": noise(*size, seed=seed + layer) for layer, size in sizes.items()}
    return weights | {f"{name}.{layer}.bias": noise(size[0], seed=seed - layer) for layer, size in sizes.items()}


PROMPTS = ["a red square", "two digits {0} and a much longer prompt than the first has"]


def written(folder: Path, text: str) -> Path:
    (folder / "template.txt").write_text(text)
    return folder / "template.txt"


def hps_v3(folder: Path) -> Published:
    processor, model, [token] = with_tokens(folder / "base", "qwen2_vl", ["<|Reward|>"])
    # As large as the published model's processor takes.
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 2**24}
    processor.save_pretrained(folder / "base")
    head = ranknet_weights("rm_head", 20)
    save_file(old_names(model.state_dict()) | head, folder / "HPSv3.safetensors")
    pictures = [picture(448, 448, seed) for seed in range(2)]
    found = []
    for prompt, image in zip(PROMPTS, pictures, strict=True):
        text = QUESTION.replace("{text_prompt}", prompt)
        [read] = reference.at_tokens(processor, model, text, "image", [image], [token], by_grid=False)
        found.append(reference.ranknet(head, "rm_head", read))
    conversations = [drawn(prompt, image) for prompt, image in zip(PROMPTS, pictures, strict=True)]
    options = {"base": folder / "base", "template": written(folder, QUESTION)}
    outputs = gaussians({"mu": found})
    return Published(folder / "HPSv3.safetensors", conversations, outputs["mu"], options, outputs)


def gaussians(found: Mapping[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean and the deviation of each output, from its μ and log σ of each conversation."""
    columns = {name: torch.stack(each).T for name, each in found.items()}
    return {name: mu for name, (mu, _) in columns.items()} | {
        f"{name}_deviation": log_sigma.exp() for name, (_, log_sigma) in columns.items()
    }


def drawn(prompt: str, image: Image.Image, *before: Image.Image) -> reference.Messages:
    """A picture as the answer to a prompt, which may have pictures itself."""
    prompts = [*({"type": "image", "image": picture} for picture in before), {"type": "text", "text": prompt}]
    return [
        {"role": "user", "content": prompts},
        {"role": "assistant", "content": [{"type": "image", "image": image}]},
    ]


def edit_reward(folder: Path, arch: str) -> Published:
    """Two heads, each asked by an instruction; the score is their mean. Qwen3-VL has a program of its own."""
    source = folder / ("EditReward-Qwen3-VL-8B" if arch == "qwen3_vl" else "EditReward-Qwen2.5-VL-7B")
    processor, model, [token] = with_tokens(folder / "base", arch, ["<|Reward|>"])
    heads = ranknet_weights("rm_heads.head_0", 40) | ranknet_weights("rm_heads.head_1", 60)
    source.mkdir()
    torch.save({"model": model.state_dict() | heads}, source / "model.pth")
    side = 128 if arch == "qwen3_vl" else 448
    images = [picture(side, side, seed) for seed in range(3)]
    found: dict[str, list[torch.Tensor]] = {}
    for number, output in enumerate(("following", "quality")):
        question = f"Is it a good {output}?\n{QUESTION}"
        (folder / f"{output}.txt").write_text(question)
        for prompt, image in zip(PROMPTS, images[1:], strict=True):
            text = question.replace("{text_prompt}", prompt)
            shown, by_grid = [images[0], image], arch == "qwen3_vl"
            [read] = reference.at_tokens(processor, model, text, "image", shown, [token], by_grid=by_grid)
            found.setdefault(output, []).append(reference.ranknet(heads, f"rm_heads.head_{number}", read))
    conversations = [drawn(prompt, image, images[0]) for prompt, image in zip(PROMPTS, images[1:], strict=True)]
    options = {"base": folder / "base", "template": folder / "{output}.txt"}
    outputs = gaussians(found)
    return Published(source, conversations, (outputs["following"] + outputs["quality"]) / 2, options, outputs)


NORM = {"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121}


def video_align(folder: Path) -> Published:
    """LoRA weights in the file of the model, as the published one has them; the reference computes them apart."""
    source = folder / "VideoReward"
    tokens = [f"<|{name}_reward|>" for name in OUTPUTS]
    processor, model, ids_of = with_tokens(folder / "base", "qwen2_vl", tokens)
    # As large as the published model's processor takes.
    processor.video_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 2**24}
    processor.save_pretrained(folder / "base")
    head = {"rm_head.weight": noise(1, WIDTH, seed=70)}
    targets = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(5)
    model = get_peft_model(model, lora).eval()
    stored = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): weight
        for name, weight in (model.state_dict() | {f"base_model.model.{n}": w for n, w in head.items()}).items()
    }
    (source / "checkpoint-11352").mkdir(parents=True)
    torch.save(stored, source / "checkpoint-11352/model.pth")
    settings = {"peft_lora_config": {"lora_r": 4, "lora_alpha": 8}, "inference_config": NORM}
    settings |= {"data_config": {"fps": 2.0, "max_frame_pixels": 200704}}
    (source / "model_config.json").write_text(json.dumps(settings))
    clips = [[picture(336, 336, 10 * seed + frame) for frame in range(4)] for seed in range(2)]
    conversations, found = [], []
    for prompt, clip in zip(PROMPTS, clips, strict=True):
        frames = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in clip])
        text = DIMENSIONS.replace("{text_prompt}", prompt)
        qwen = model.base_model.model
        read = reference.at_tokens(processor, qwen, text, "video", [frames], ids_of, by_grid=False)
        found.append((read @ head["rm_head.weight"].T)[:, 0])
        video = [{"type": "video", "video": clip}]
        conversations.append([{"role": "user", "content": prompt}, {"role": "assistant", "content": video}])
    options = {"base": folder / "base", "template": written(folder, DIMENSIONS)}
    raw = zip(OUTPUTS, torch.stack(found).T, strict=True)
    outputs = {name: (scores - NORM[f"{name}_mean"]) / NORM[f"{name}_std"] for name, scores in raw}
    return Published(source, conversations, torch.stack([*outputs.values()]).sum(0), options, outputs)


CASES = [
    Case("skywork", "Skywork-VL-Reward-7B", skywork),
    Case("value_head", "LLaMA-Factory, `value_head.bin`", llama_factory),
    Case("value_head", "LLaMA-Factory, LoRA", adapter_value_head),
    Case("value_head", "TRL, `v_head.*` in shards", trl_value_head),
    Case("score", "TRL and transformers", trl_score),
    Case("score", "ms-swift", ms_swift),
    Case("score", "ms-swift, inside the language model", another_family),
    Case("score", "peft, `modules_to_save`", adapter_score),
    Case("basereward", "BaseReward", base_reward),
    Case("hpsv3", "HPSv3", hps_v3),
    Case("editreward", "EditReward", lambda folder: edit_reward(folder, "qwen2_5_vl")),
    Case("editreward_qwen3", "EditReward-Qwen3-VL", lambda folder: edit_reward(folder, "qwen3_vl")),
    Case("videoalign", "VideoAlign", video_align),
]

"""The layouts in which reward models are published: how each is recognised, and what its authors compute.

A score is always read at the last token of a conversation. Where the authors read it at a token in the middle, the
imported chat template ends with that token: attention is causal, so nothing after it changes the score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling.published_template import Turn, llava_turn

# Weights of other trainers' heads (v_head.summary.bias, rm_head.0.weight, classifier.weight), and biases of `score`.
HEAD_WEIGHTS = re.compile(r"(^|\.)((?!lm_head)\w+_heads?|score\w*|classifier|regression\w*)\.")
KIND = r"(?P<kind>weight|bias)"


@dataclass(frozen=True)
class Output:
    """One of the scores of a published model.

    Args:
        token: the reward token at which it is read; None for the last token of the conversation.
        head: its group in the name of the head's weights, where each output has a head of its own.
    """

    token: str | None = None
    head: str | None = None


@dataclass(frozen=True)
class Layout:
    """A layout: the names of its head's weights, and what its authors compute from them.

    Args:
        head: pattern of the whole names, with the groups `kind`, `layer` where there are several and `head`.
        source: where the arithmetic was read.
        activation: after each layer but the last.
        layers: the names of its layers, where they are known.
        bias: whether all its layers have one; None where either may be.
        rows: the numbers that the last layer may give at a token.
        ids: beginnings of the names of repositories and folders, in lower case; a layout without is for any model.
        outputs: its scores by name; several need `--output-name`.
        question: placeholders of the instruction, which `--template` gives; empty where the chat template is the
            checkpoint's own.
        turn: what stands around the instruction, where it is not the processor's own chat template.
        pixels: area of every image.
        text_positions: whether its images had the positions of text.
        renamed: further names of weights than those that transformers knows: patterns and what replaces them.
        base: repository of its configuration and processor, where it comes without.
        settings: file with `peft_lora_config` and the normalisation of each output, `inference_config`.
        refused: why it cannot be imported.
    """

    name: str
    head: str
    source: str
    activation: str | None = None
    layers: Sequence[str] = ()
    bias: bool | None = None
    rows: Sequence[int] = (1,)
    ids: Sequence[str] = ()
    outputs: Mapping[str, Output] = field(default_factory=lambda: {"score": Output()})
    question: Sequence[str] = ()
    turn: Callable[[Any], Turn] | None = None
    pixels: int | None = None
    text_positions: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None
    settings: str | None = None
    refused: str | None = None

    @property
    def tokens(self) -> list[str]:
        """The reward tokens, in the order in which the authors add them to the tokenizer."""
        return list(dict.fromkeys(output.token for output in self.outputs.values() if output.token))

    def matches(self, name: str) -> re.Match[str] | None:
        """Return the match of a weight's name, if it is one of the head's."""
        return re.fullmatch(rf"(?:\w+\.)*?{self.head}", name)


VALUE_HEAD = Layout(
    "value_head",
    rf"v_head\.summary\.{KIND}",
    "TRL, AutoModelForCausalLMWithValueHead; LLaMA-Factory ff6d4d1, train/rm/trainer.py",
    bias=True,
)
# Two numbers at the token, of which the first is the score: μ and log σ.
RANKNET = Layout(
    "",
    rf"rm_head\.(?P<layer>\d+)\.{KIND}",
    "",
    "relu",
    layers=["0", "3", "5"],
    bias=True,
    rows=[2],
    question=["{text_prompt}"],
    pixels=256 * 28 * 28,
    text_positions=True,
)
# LLaVA-NeXT's names to transformers'.
LLAVA_NEXT = {
    r"^model\.vision_tower\.vision_tower\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
    r"^model\.(layers|norm|embed_tokens)\b": r"model.language_model.\1",
}

LAYOUTS = (
    VALUE_HEAD,
    replace(
        VALUE_HEAD,
        name="skywork",
        ids=["skywork-vl-reward"],
        source="the model card of Skywork/Skywork-VL-Reward-7B; arXiv:2505.07263",
    ),
    Layout(
        "score",
        rf"score\.{KIND}",
        "transformers, GenericForSequenceClassification; TRL, RewardTrainer; ms-swift 3602360, model/patcher.py",
    ),
    Layout(
        "basereward",
        rf"(?:score|v_head|rm_head|reward_head|value_head)\.(?:\w+\.)??(?P<layer>\d+)\.{KIND}",
        "arXiv:2509.16127, section on the reward head; its code is not published",
        "silu",
        ids=["basereward"],
    ),
    replace(
        RANKNET,
        name="hpsv3",
        source="MizzenAI/HPSv3, hpsv3/model/qwen2vl_trainer.py; arXiv:2508.03789",
        ids=["hpsv3"],
        outputs={"mu": Output("<|Reward|>")},
        base="Qwen/Qwen2-VL-7B-Instruct",
    ),
    replace(
        RANKNET,
        name="editreward",
        head=rf"rm_heads\.(?P<head>\w+)\.(?P<layer>\d+)\.{KIND}",
        source="TIGER-AI-Lab/EditReward edb027e, model/qwen2_5_vl_trainer.py",
        ids=["editreward"],
        outputs={"following": Output("<|Reward|>", "head_0"), "quality": Output("<|Reward|>", "head_1")},
    ),
    Layout(
        "videoalign",
        rf"rm_head\.{KIND}",
        "KwaiVGI/VideoAlign 219ab9d, trainer.py and inference.py",
        bias=False,
        rows=[1, 3],
        ids=["videoreward", "videoalign"],
        outputs={name: Output(f"<|{name}_reward|>") for name in ("VQ", "MQ", "TA")},
        question=["{text_prompt}"],
        text_positions=True,
        base="Qwen/Qwen2-VL-2B-Instruct",
        settings="model_config.json",
    ),
    Layout(
        "mm_rlhf",
        rf"rm_head\.(?P<layer>dense|out_proj)\.{KIND}",
        "Kwai-YuanQi/MM-RLHF 7c8af1d, llava/model/language_model/llava_qwen.py and llava/eval/eval_mm_reward_bench.py",
        "tanh",
        layers=["dense", "out_proj"],
        bias=True,
        ids=["mm-rlhf-reward"],
        question=["{question}", "{answer}"],
        turn=llava_turn,
        renamed=LLAVA_NEXT,
        base="llava-hf/llava-onevision-qwen2-7b-ov-hf",
    ),
    Layout(
        "ixc_reward",
        rf"score\.{KIND}",
        "internlm/internlm-xcomposer2d5-7b-reward; arXiv:2501.12368",
        ids=["internlm-xcomposer2d5", "ixc-2.5-reward"],
        refused="its architecture, whose adapters act on the tokens of images alone, is code in its own repository "
        "and not in transformers; score with that code",
    ),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def find_layout(source: str | Path, names: Iterable[str], name: str | None = None) -> Layout:
    """Return the layout called `name`, or else that of a source's own name, or of the names of its weights.

    Raises:
        ConfigError: when there is no such layout, or the head could be of several.
        CheckpointError: when there is no head, or the layout is refused.
    """
    names = list(names)
    if name is not None and name not in BY_NAME:
        raise ConfigError(f"--layout is {name!r}: choose one of {', '.join(BY_NAME)}.")
    found = [layout for layout in LAYOUTS if any(map(layout.matches, names))]
    called = [layout for layout in LAYOUTS if _is_called(source, layout)]
    layout = BY_NAME[name] if name else next(iter(called), None)
    if layout is None:
        general = [candidate for candidate in found if not candidate.ids]
        if len(general) != 1:
            raise CheckpointError(_unrecognised(source, [candidate.name for candidate in found], names))
        layout = general[0]
    if layout.refused:
        raise CheckpointError(f"{source} cannot be imported: {layout.refused}.")
    if layout not in found:
        raise CheckpointError(
            f"{source} has no head of layout {layout.name}: none of its {len(names)} weights is called as one"
            + (f"; --layout {found[0].name} fits" if found else "")
            + "."
        )
    return layout


def _is_called(source: str | Path, layout: Layout) -> bool:
    path = Path(source)
    return any(part.lower().startswith(start) for part in (path.stem, path.name) for start in layout.ids)


def _unrecognised(source: str | Path, found: Sequence[str], names: Sequence[str]) -> str:
    if found:
        return (
            f"{source} has a head that several models have, and each reads it at another token: say which it is by "
            f"--layout {' or '.join(found)}."
        )
    if heads := [name for name in names if HEAD_WEIGHTS.search(name)]:
        return f"{source} has a trained head in no layout that is known ({heads[0]}): score it with its own code."
    return f"{source} has no reward head in its {len(names)} weights: train one, with vlmrm train."

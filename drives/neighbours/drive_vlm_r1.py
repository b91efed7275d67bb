"""VLM-R1: its trainer by the reward of examples/frameworks, to the advantages; what a policy says is given."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from checks import ANSWERS, QUESTION, Case, main, normalised, raised, ran, recipe, scored
from open_r1.trainer import VLMGRPOTrainer

END = 0  # its tokens are letters


class Policy(torch.nn.Module):
    """Says each answer where a model would generate one."""

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        said = [torch.tensor([*map(ord, answer), END]) for answer in ANSWERS]
        padded = torch.nn.utils.rnn.pad_sequence(said, batch_first=True, padding_value=END)
        return torch.cat([input_ids, padded.repeat(len(input_ids) // len(ANSWERS), 1)], dim=1)


def letters(batch: torch.Tensor, **_: Any) -> list[str]:
    return ["".join(chr(token) for token in row if token != END) for row in batch]


def row(picture: str) -> dict[str, Any]:
    """As its grpo_jsonl.py makes one."""
    content = [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]
    return {"image_path": [picture], "problem": QUESTION, "prompt": [{"role": "user", "content": content}]}


def trained(case: Case, url: str, pictures: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """The rewards and advantages of its trainer, without a model."""
    trainer = object.__new__(VLMGRPOTrainer)
    module = SimpleNamespace(
        prepare_prompt=lambda processor, inputs: [QUESTION] * len(inputs),
        prepare_model_inputs=lambda processor, texts, *_, **options: (
            {"input_ids": torch.ones(len(texts), 1, dtype=torch.long), "attention_mask": torch.ones(len(texts), 1)},
            None,
        ),
        get_non_generate_params=lambda: ["attention_mask"],
        is_embeds_input=lambda: False,
        get_custom_multimodal_keywords=lambda: [],
    )
    found: list[float] = []

    def people(**columns: Any) -> list[float]:
        found.extend(recipe("vlm_r1_reward", url, case.folder).people(**columns))
        return found

    vars(trainer).update(
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(past_index=-1, device=torch.device("cpu")),
        is_deepspeed_enabled=False,
        vlm_module=module,
        processing_class=SimpleNamespace(eos_token_id=END, batch_decode=letters),
        generation_config=None,
        num_iterations=1,
        beta=0.0,
        num_generations=len(ANSWERS),
        reward_funcs=[people],
        reward_processing_classes=[None],
        _metrics=defaultdict(list),
    )
    inputs = [row(picture) for picture in pictures for _ in ANSWERS]
    return found, trainer._generate_and_score_completions(inputs, Policy())["advantages"].tolist()


def equal(case: Case) -> dict[str, Any]:
    rewards, advantages = trained(case, case.url, case.pictures)
    expected = normalised(rewards, [picture for picture, _ in case.rows()], epsilon=1e-4)
    assert abs(expected - advantages).max() < 1e-4, (expected, advantages)
    return ran("in its trainer", [scored(*row, reward) for row, reward in zip(case.rows(), rewards, strict=True)])


def broken(case: Case) -> str:
    return raised(lambda: trained(case, case.url, (case.broken,)), "RewardError", "sample 0")


def away(case: Case) -> str:
    return raised(lambda: trained(case, case.away, case.pictures), "RewardError", case.away)


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})

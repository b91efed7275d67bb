"""Critiques learned beside the score: a language-model loss on a further branch of the row, that of transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.batching.test_shared import in_type
from tests.families.reference import rounding_nowhere
from tests.runs import square, write_rows
from vlmrm import load_scorer
from vlmrm.batching import ComparisonCollator
from vlmrm.batching.collator import CRITICISE
from vlmrm.conversation import Comparison, Judgement, Message
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.errors import ConfigError, RowError
from vlmrm.modeling import batcher_for, load_for_training
from vlmrm.modeling.published_weights import read_language_head
from vlmrm.rendering import Renderer

ANSWERS = ("four", "five of them")
CRITIQUES = ("It counts all four.", "It counts one that is not there.")
ROW = Comparison(
    "pair",
    (Message.of("user", "How many?"),),
    tuple((Message.of("assistant", text),) for text in ANSWERS),
    (Judgement((0, 1), (1, 0)),),
    critiques=CRITIQUES,
)


def expected_loss(model, processor) -> torch.Tensor:
    """The summed loss of the critiques by the language model of transformers, each conversation alone."""
    losses = []
    for answer, critique in zip(ANSWERS, CRITIQUES, strict=True):
        turns = [("user", "How many?"), ("assistant", answer), ("user", CRITICISE), ("assistant", critique)]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        before = processor.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = processor.tokenizer(
            processor.apply_chat_template(messages, tokenize=False), return_tensors="pt"
        ).input_ids
        labels = ids.clone()
        labels[:, : len(processor.tokenizer(before).input_ids)] = -100
        losses.append(model(input_ids=ids, labels=labels, use_cache=False).loss * (labels != -100).sum())
    return torch.stack(losses).sum()


@pytest.mark.parametrize("batching", ["shared", "reference"])
@pytest.mark.parametrize("budget", [None, 60])
def test_critiques_have_the_gradient_of_the_language_model(tiny_checkpoint, batching, budget):
    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    language = AutoModelForImageTextToText.from_pretrained(tiny_checkpoint, **options).to(torch.float64).eval()
    model = load_for_training(tiny_checkpoint, **options, seed=1).to(torch.float64).eval()
    model.language_head = read_language_head(tiny_checkpoint, model.config).to(torch.float64)
    collator = ComparisonCollator(Renderer(processor), batcher_for(model, processor, batching), 512, budget)
    with rounding_nowhere():
        [plain] = collator([{"index": 0, "comparison": ROW}])["parts"]
        [part] = replace(collator, critique_weight=1.0)([{"index": 0, "comparison": ROW}])["parts"]
        assert (len(part["inputs"]) > 1) == (budget is not None)
        scored = [[model(**in_type(it, torch.float64)) for it in forwards["inputs"]] for forwards in (plain, part)]
        before, beside = (torch.cat([it.logits for it in each]) for each in scored)
        loss = sum(it.loss for it in scored[1] if it.loss is not None)
        expected = expected_loss(language, processor)
        names = [name for name, _ in model.model.named_parameters() if "visual" not in name]
        of_step = torch.autograd.grad(loss, [model.model.get_parameter(name) for name in names])
        of_transformers = torch.autograd.grad(expected, [language.model.get_parameter(name) for name in names])
    torch.testing.assert_close(beside[part["order"]][:2], before[plain["order"]], rtol=1e-12, atol=1e-12)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for a, b in zip(of_step, of_transformers, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm().clamp_min(1e-3)


def rows(folder, **columns):
    row = {"prompt": "Which colour?", "chosen": "It is red.", "rejected": "blue"}
    written = [row | {"images": [square(folder, 6 * i)], "prompt": f"{i}?"} | columns for i in range(4)]
    return write_rows(folder / "rows.jsonl", written)


def test_a_training_learns_to_criticise_and_saves_a_reward(train_here, tmp_path):
    data = rows(tmp_path, critique=["It is right.", None])
    keys = {"max_steps": 20, "learning_rate": 1e-2, "save_steps": 20, "use_irrelevant_queries": False}
    train_here(data, critique_weight=0.5, eval_fraction=0.3, **keys)
    state = json.loads((tmp_path / "out/checkpoint-20/trainer_state.json").read_text())
    losses = [entry["loss_critique"] for entry in state["log_history"] if "loss_critique" in entry]
    assert len(losses) == 20 and losses[-1] < losses[0] / 2
    held_out = load_comparisons([str(tmp_path / "out/held_out.jsonl")], arguments=DataArguments(critique_weight=1.0))
    assert [row["comparison"].critiques for row in held_out] == [("It is right.", None)] * len(held_out) != []
    with safe_open(tmp_path / "out/final/model.safetensors", "pt") as weights:
        assert not any("lm_head" in name or "language_head" in name for name in weights.keys())  # noqa: SIM118
    assert len(load_scorer(tmp_path / "out/final").score_groups([("Which colour?", ["It is red."])])) == 1


def test_critiques_that_nobody_wrote_are_refused(train_here, tmp_path):
    with pytest.raises(ConfigError, match="no row of 4 has a critique: map its column"):
        train_here(rows(tmp_path), critique_weight=1.0)
    with pytest.raises(RowError, match="`critique` is no text for each of 2 answers"):
        train_here(rows(tmp_path, critique={"chosen": "It is right.", "rejected": "No."}), critique_weight=1.0)

"""Models of several named outputs: their losses, their gradients, and the way from a table to a reward."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoProcessor

from tests.batching.test_shared import in_type
from tests.families.reference import rounding_nowhere
from tests.runs import square, write_rows
from vlmrm import cli, evaluate, load_scorer
from vlmrm.batching import ComparisonCollator
from vlmrm.conversation import Comparison, Judgement, Message
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm.evaluation.report import build_report, write_card
from vlmrm.modeling import batcher_for, load_for_training
from vlmrm.modeling.manifest import scale_in
from vlmrm.outputs import Outputs
from vlmrm.rendering import Renderer
from vlmrm.rewards import RewardArguments, RewardSet
from vlmrm.training.losses import Objective, gaussian, judged_weights

KINDS = {
    "overall": "preference",
    "spread": "gaussian",
    "clarity": "rating 1-5 apart",
    "safety": "ordinal 0-4 apart",
    "right": "correctness",
    "done": "progress in 4",
}
OUTPUTS = Outputs.parse(KINDS)
APART = "{% if output is defined %}How much {{ output }}?{% endif %}"  # what the chat template asks after the answer
QUESTION = (Message.of("user", "How many?"),)


def answers(*texts: str) -> tuple[tuple[Message, ...], ...]:
    return tuple((Message.of("assistant", text),) for text in texts)


JUDGED = [
    Comparison("pair", QUESTION, answers("four", "five"), (Judgement((0, 1), (1, 0), margin=0.5),)),
    Comparison("spread", QUESTION, answers("four", "five"), (Judgement((0, 1), (0, 1), dimension="spread"),)),
    Comparison("one", QUESTION, answers("four"), (Judgement((0,), (4,), "rating", weight=2.0, dimension="clarity"),)),
    Comparison("one more", QUESTION, answers("six"), (Judgement((0,), (2,), "rating", dimension="safety"),)),
    Comparison("steps", QUESTION, answers("two", "two and two"), (Judgement((0, 1), (1, 0), "correctness"),)),
    Comparison("frames", QUESTION, answers("a", "a b", "a b c"), (Judgement((0, 1, 2), (0, 0.5, 1), "progress"),)),
]


def collated(model, processor, batching):
    batcher = batcher_for(model, processor, batching)
    renderer = Renderer(processor, branches=OUTPUTS.branches)
    collator = ComparisonCollator(renderer, batcher, max_seq_length=512, outputs=OUTPUTS)
    [part] = collator([{"index": i, "comparison": row} for i, row in enumerate(JUDGED)])["parts"]
    return part


def by_hand(model, processor) -> torch.Tensor:
    """The loss of `JUDGED`, from the backbone of transformers, each conversation alone, and formulas of one line."""
    rows = []
    for talk in (talk for row in JUDGED for talk in row.conversations()):
        turns = [{"role": it.role, "content": [{"type": "text", "text": it.text}]} for it in talk.messages]
        columns = []
        for asked in ({}, {"output": "clarity"}, {"output": "safety"}):
            text = processor.apply_chat_template(turns, tokenize=False, **asked)
            hidden = model.model(**processor.tokenizer(text, return_tensors="pt"), use_cache=False).last_hidden_state
            columns.append(hidden[0, -1] @ model.score.weight.T + model.score.bias)
        rows.append(torch.cat([columns[0][:3], columns[1][3:4], columns[2][4:8], columns[0][8:]]))
    z = torch.stack(rows)
    bins = z[8:, 9:].log_softmax(1)
    nodes, weights = (torch.tensor(it) for it in np.polynomial.hermite.hermgauss(16))
    spread = (2 * z[2:4, 2]).exp().sum().mul(2).sqrt()
    drawn = (torch.sigmoid(z[3, 1] - z[2, 1] + spread * nodes) * weights).sum() / math.pi**0.5
    ordinal = z[5, 4:8]
    return (
        -logsigmoid(z[0, 0] - z[1, 0] - 0.5)
        - drawn.log()
        - (0.75 * logsigmoid(z[4, 3]) + 0.25 * logsigmoid(-z[4, 3]))
        - (logsigmoid(ordinal[0]) + logsigmoid(ordinal[1]) + logsigmoid(-ordinal[2]) + logsigmoid(-ordinal[3]))
        - (logsigmoid(z[6, 8]) + logsigmoid(-z[7, 8])) / 2
        - (bins[0, 0] + (bins[1, 1] + bins[1, 2]) / 2 + bins[2, 3]) / 3
    )


@pytest.mark.parametrize("batching", ["shared", "reference"])
def test_every_kind_has_the_gradient_of_its_formula(tiny_checkpoint, batching):
    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    processor.chat_template += APART
    options = {"outputs": OUTPUTS, "dtype": torch.float32, "attn_implementation": "sdpa", "seed": 1}
    model = load_for_training(tiny_checkpoint, **options).to(torch.float64).eval()
    with rounding_nowhere():
        weights = [weight for name, weight in model.named_parameters() if "visual" not in name]
        expected = by_hand(model, processor)
        part = collated(model, processor, batching)
        logits = model(**in_type(part["inputs"][0], torch.float64)).logits
        totals = judged_weights(part["pairs"], len(OUTPUTS))
        loss = sum(Objective(outputs=OUTPUTS)(logits, in_type(part["pairs"], torch.float64), totals).values())
        of_formula, of_step = (torch.autograd.grad(it, weights, allow_unused=True) for it in (expected, loss))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert any(gradient is not None for gradient in of_step)
    for a, b in zip(of_step, of_formula, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 1e-10 * b.norm().clamp_min(1e-3)


def test_a_gaussian_integrates_what_samples_approach():
    difference, variance = torch.tensor([0.7, -1.2]).double(), torch.tensor([0.5, 4.0]).double()
    grid = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    drawn = difference[:, None] + variance.sqrt()[:, None] * grid
    expected = -(torch.sigmoid(drawn) * density).sum(1).log()
    found = gaussian(difference, variance, torch.tensor([False] * 2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_outputs_have_equal_parts_whatever_judges_more(tiny_checkpoint):
    """Ten ratings weigh no more than one pair: each output's loss is its own mean."""
    model = load_for_training(tiny_checkpoint, outputs=OUTPUTS)
    part = collated(model, AutoProcessor.from_pretrained(tiny_checkpoint), "shared")
    logits = torch.randn(len(part["order"]), OUTPUTS.columns)
    many = {name: torch.cat([tensor, *([tensor[2:3]] * 9)]) for name, tensor in part["pairs"].items()}
    losses = [Objective(outputs=OUTPUTS)(logits, it, judged_weights(it, 6)) for it in (part["pairs"], many)]
    assert [*losses[0]] == [*KINDS, "irrelevant"]
    assert losses[0]["clarity"].item() == pytest.approx(losses[1]["clarity"].item(), rel=1e-6)


# From a table to a reward ------------------------------------------------------------------------------------------

RATED = {"outputs": {"red": "rating 1-5", "size": "ordinal 1-3"}, "total": {"red": 1, "size": 0.5}}


def ratings(folder, count=12):
    folder.mkdir(parents=True, exist_ok=True)
    images = [square(folder, i) for i in range(count)]
    rows = [{"prompt": f"Picture {i}", "response_image": name} for i, name in enumerate(images)]
    rows = [row | {"red": 1 + 4 * (i % 6 == 0), "size": 1 + i % 3 if i else None} for i, row in enumerate(rows)]
    return write_rows(folder / "rated.jsonl", rows)


def show_the_error_of_size(model, data):
    """Evaluate a model on ratings alone, whose outputs no key names; show the results, and return one."""
    result = evaluate(model_dirs=model, dataset_path=str(data), output_file="results.csv")
    assert result.choice["metric"] == "red_rank"
    text = build_report(["results.csv"], "report").read_text() + write_card(model, "results.csv", data="d").read_text()
    assert text.count("ordinal 1-3") == 2 and text.count("painted grey") == 2 * len(RATED["outputs"])
    return result.best["outputs"]["size"]["error"]


@pytest.mark.parametrize("adapter", [False, True])
def test_ratings_become_a_reward_of_each_output(train_here, tmp_path, adapter, capsys):
    data = ratings(tmp_path / "data")
    words = {key: [f"{name}={value}" for name, value in names.items()] for key, names in RATED.items()}
    words |= {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "load_best_model_at_end": True}
    train_here(data, use_peft=adapter, eval_dataset_path=data, metric_for_best_model="red_rank", **words)
    history = json.loads(next(tmp_path.glob("out/checkpoint-*/trainer_state.json")).read_text())["log_history"]
    evaluated = next(entry for entry in history if "eval_red_rank" in entry)
    assert evaluated["eval_red_ratings"] == 12 and evaluated["eval_size_ratings"] == 11
    scorer = load_scorer(tmp_path / "out/best")
    of_training = scale_in("out/best")["reward_scales"]["red"]["reward_quantiles"]
    assert show_the_error_of_size("out/best", data)["low"] > 0
    assert scale_in("out/best")["reward_scales"]["red"]["reward_quantiles"] == pytest.approx(of_training, rel=1e-3)
    rows = load_comparisons([str(data)], arguments=DataArguments(**RATED))
    talks = [row["comparison"].conversations()[0] for row in rows]
    named, totals = scorer.score_outputs(talks), scorer.score(talks)
    for values, total in zip(named, totals, strict=True):
        assert 1 <= values["size"] <= 3 and total == pytest.approx(values["red"] + 0.5 * values["size"], rel=1e-6)
    images = [str(tmp_path / "data" / square(tmp_path / "data", i)) for i in range(3)]
    options = {"model_path": str(tmp_path / "out/best"), "output": "size"}

    def sizes(**more: str):
        arguments = RewardArguments("size", "vlm_reward", dtype="float32", extra_kwargs=options | more)
        return RewardSet([arguments])(prompt=[f"Picture {i}" for i in range(3)], image=images).total()

    assert sizes() == pytest.approx([it["size"] for it in named[:3]], abs=1e-5)
    lower = [np.mean([other["size"] < it["size"] for other in named[1:]]) for it in named[:3]]  # the first has no size
    assert sizes(transform="percentile") == pytest.approx(lower, abs=0.1)
    with pytest.raises(SystemExit, match="0"):
        cli.app(["calibrate", "out/best", "--dataset_path", str(data), "--max_eval_samples", "6"])
    assert scale_in("out/best")["reward_count"] == 6
    with pytest.raises(ConfigError, match=r"no output sise: did you mean size"):
        sizes(output="sise")
    with pytest.raises(SystemExit, match="0"):
        cli.app(["score", "--model", "out/best", "--prompt", "Picture 0", "--response-image", images[0], "--json"])
    written = capsys.readouterr().out
    [said] = json.loads(written[written.index("{\n") :])["answers"]
    assert said["outputs"] == pytest.approx(named[0], abs=1e-5)


def test_an_output_that_no_row_judges_is_refused(train_here, tmp_path):
    with pytest.raises(ConfigError, match="no row of 12 judges the output clear: map its column"):
        train_here(ratings(tmp_path / "data"), outputs=["red=rating 1-5", "clear=rating 1-5"])
    with pytest.raises(ConfigError, match="the chat template knows no variable `output`"):
        train_here(ratings(tmp_path / "data"), outputs=["red=rating 1-5 apart", "size=ordinal 1-3"])
    with pytest.raises(
        ConfigError, match=r"metric_for_best_model is loss, of pairs, .* one of red_rank, red_accuracy, red_error\."
    ):
        keys = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "load_best_model_at_end": True}
        train_here(ratings(tmp_path), outputs=["red=rating 1-5"], eval_dataset_path=ratings(tmp_path), **keys)


def test_a_model_keeps_the_outputs_it_was_trained_with(tiny_checkpoint, tmp_path):
    load_for_training(tiny_checkpoint, outputs=OUTPUTS).save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"write outputs: \{overall: preference, spread: gaussian"):
        load_for_training(tmp_path / "model")
    load_for_training(tiny_checkpoint).save_pretrained(tmp_path / "plain")
    assert "reward_outputs" not in (tmp_path / "plain/config.json").read_text()


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "total", "reason"),
    [
        ({"clarity": "rating"}, None, "rating LOW-HIGH"),
        ({"clarity": "stars 1-5"}, None, "write preference, gaussian"),
        ({"clarity": "rating 5-1"}, None, "from low to high"),
        ({"clarity": "ordinal 0.5-2"}, None, "whole numbers"),
        ({"clarity": "rating 1-5"}, {"clarity": 0}, "weighs every output by 0"),
        ({"prompt": "preference"}, None, "called prompt, a column of docs/data.md"),
        ({"clarity": "rating 1-5"}, {"clairty": 1}, "clairty, which is no output"),
        (None, {"clarity": 1}, "there is only one"),
        ({"clarity": "rating 1-5"}, {"clarity": "much"}, "what is no number"),
    ],
)
def test_outputs_that_cannot_be_are_refused(outputs, total, reason):
    with pytest.raises(ConfigError, match=reason):
        DataArguments(outputs=outputs, total=total)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"response": "a", "clarity": 7}, "its clarity is 7, outside of 1 to 5"),
        ({"responses": ["a", "b"], "clarity": [4]}, "1 values for 2 answers"),
        ({"response": "a", "clarity": "good"}, "write a number for each answer"),
        ({"response": "a"}, "nothing says how good"),
        ({"steps": ["a", "b"], "labels": [1, 0]}, "a correctness, which no output answers"),
        ({"steps": ["a", "b"], "labels": [1]}, "2 steps and 1 labels"),
        ({"frames": ["a.png"], "progress": []}, "1 frames and 0 values"),
    ],
)
def test_rows_that_train_no_output_are_refused(tmp_path, cells, reason):
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "What?", **cells}])
    with pytest.raises(DataError, match=reason):
        raise load_comparisons([str(file)], arguments=DataArguments(outputs={"clarity": "rating 1-5"}))[0][
            "comparison"
        ]


def test_a_word_in_a_table_blames_its_own_row(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,response,clarity,safety\nWhat?,a,4.5,2\nWhat?,b,good,\nWhat?,c,,2.5\n")
    outputs = {"clarity": "rating 1-5", "safety": "ordinal 0-4"}
    opened = load_comparisons([str(tmp_path / "rows.csv")], arguments=DataArguments(outputs=outputs))
    rows = [it["comparison"] for it in opened]
    assert [it.values for it in rows[0].judgements] == [(4.5,), (2.0,)]
    assert "holds 'good'" in str(rows[1]) and "2.5, and an ordinal has whole numbers" in str(rows[2])


def test_a_verdict_beside_its_criteria_is_no_judgement_of_one(tmp_path):
    row = {"prompt": "a fox", "path_A": "a.mp4", "path_B": "b.mp4", "VQ": "A", "MQ": "same", "Overall": "A"}
    file = write_rows(tmp_path / "rows.jsonl", [row])
    both = {"VQ": "preference", "MQ": "preference"}

    def read(**outputs):
        [one] = load_comparisons([str(file)], arguments=DataArguments(outputs=outputs))
        return one["comparison"]

    with pytest.raises(DataError, match="it judges VQ by the column of this name and once more"):
        raise read(**both)
    judged = {it.dimension: it.values for it in read(**both, Overall="preference").judgements}
    assert judged == {"VQ": (1.0, 0.0), "MQ": (0.0, 0.0), "Overall": (1.0, 0.0)}

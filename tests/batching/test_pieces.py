"""A comparison over the token budget: cut where it costs least, with the scores and gradients of the padded batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from tests.batching.test_shared import CASES, in_type, size_of
from tests.conversations import rated
from tests.families.reference import rounding_nowhere
from vlmrm.batching import ComparisonCollator
from vlmrm.batching.pieces import cheapest_runs, shared_costs
from vlmrm.conversation import Comparison, Image, Message
from vlmrm.engine import Engine
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import load_for_training, load_processor
from vlmrm.modeling.attention import batcher_for
from vlmrm.rendering import Renderer
from vlmrm.training.losses import Objective, judged_weights
from vlmrm.training.step import passes_of


def divisions(count: int):
    """Every division of 0 to count - 1 into runs."""
    for size in range(count):
        for cuts in itertools.combinations(range(1, count), size):
            edges = [0, *cuts, count]
            yield [range(first, stop) for first, stop in itertools.pairwise(edges)]


items = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=7)


@given(items, st.integers(1, 40))
def test_the_cheapest_division_within_the_budget_is_chosen(made, budget):
    lengths = [length for length, _, _ in made]
    shared = [0, *(min(common, a, b) for (_, common, _), a, b in zip(made[1:], lengths, lengths[1:], strict=False))]
    media = [{str(key): 5} if key else {} for _, _, key in made]

    def cost(run: Sequence[int]) -> int:
        tokens = sum(lengths[i] for i in run) - sum(shared[i] for i in run[1:])
        return tokens + 5 * len({key for i in run for key in media[i]})

    allowed = [
        division for division in divisions(len(made)) if all(len(run) == 1 or cost(run) <= budget for run in division)
    ]
    least = min((sum(map(cost, division)), len(division)) for division in allowed)
    chosen = cheapest_runs(len(made), shared_costs(lengths, shared, media), budget)
    assert chosen in allowed
    assert (sum(map(cost, chosen)), len(chosen)) == least


def test_the_real_size_of_runs_respects_the_budget():
    """A batch may repeat a prefix that saves little: its row is then longer than what its conversations differ in."""
    costs = shared_costs([10] * 6, [0] * 6, [{}] * 6)
    assert [len(run) for run in cheapest_runs(6, costs, 30, lambda run: 11 * len(run))] == [2, 2, 2]


def test_prompts_stay_whole_where_cutting_would_repeat_one():
    """Two prompts of 100 tokens with four answers of 10: a budget of 190 is filled by neither."""
    lengths = [110] * 8
    shared = [0, 100, 100, 100, 0, 100, 100, 100]
    assert cheapest_runs(8, shared_costs(lengths, shared, [{}] * 8), 260) == [range(4), range(4, 8)]


# Ranked answers, other prompts' branches, several images: (chosen, rejected) of each pair.
PAIRS = {
    "ranked list": [(0, 1), (1, 2), (2, 3), (4, 3)],
    "irrelevant branches": [(0, 1), (2, 3), (4, 5)],
    "several images": [(0, 1)],
    "a shared image": [(0, 1), (2, 3), (0, 3)],
}


@pytest.fixture(scope="module")
def models(tiny_checkpoint):
    """Equal models with their batchers, by kind of batch, in float64."""
    processor, made = load_processor(tiny_checkpoint), {}
    for kind in ("reference", "shared"):
        model = load_for_training(tiny_checkpoint, dtype=torch.float32, attn_implementation="sdpa", seed=1)
        made[kind] = model.double().train(), batcher_for(model, processor, kind)
    return made


@pytest.fixture(scope="module")
def rendered(tiny_checkpoint):
    renderer, cache = Renderer(load_processor(tiny_checkpoint)), {}
    return {name: [renderer.render(read_conversation(c), cache) for c in CASES[name]] for name in PAIRS}


def part_of(batcher, rendered, pairs, pieces) -> dict:
    chosen, rejected = torch.tensor(pairs).unbind(1)
    of_none = torch.zeros(len(pairs), dtype=torch.bool)
    return {
        "inputs": [in_type(batcher([rendered[i] for i in piece]), torch.float64) for piece in pieces],
        "order": torch.tensor([i for piece in pieces for i in piece]).argsort(),
        "pairs": {
            **{"chosen": chosen, "rejected": rejected, "tie": of_none, "irrelevant": of_none},
            **{"margin": torch.full([len(pairs)], 0.25), "weight": torch.ones(len(pairs))},
            **{"output": torch.zeros(len(pairs), dtype=torch.long), "target": torch.full([len(pairs)], math.nan)},
        },
    }


def loss_of(scores, part):
    terms = Objective(center_coefficient=0.1)(scores, part["pairs"], judged_weights(part["pairs"]))
    return torch.stack(list(terms.values())).sum()


def step(model, part) -> tuple[torch.Tensor, list[torch.Tensor], float]:
    """The scores of a part, the gradient of each weight, and the loss, by the passes of a training step."""
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(p) for p in parameters]
    scores, loss = [], 0.0

    def forward(inputs):
        return model(**inputs).logits

    for each in passes_of(part, loss_of, torch.no_grad()(forward), torch.device("cpu")):
        scores.append(forward(each.inputs))
        value = each.loss(scores[-1])
        loss += value.item()
        added = torch.autograd.grad(value, parameters, allow_unused=True)
        gradients = [g if more is None else g + more for g, more in zip(gradients, added, strict=True)]
    return torch.cat(scores)[part["order"]].detach(), gradients, loss


def distance(gradients, others) -> float:
    return max(((a - b).norm() / b.norm().clamp_min(1e-3)).item() for a, b in zip(gradients, others, strict=True))


def padded_step(models, rendered, pairs):
    model, batcher = models["reference"]
    return step(model, part_of(batcher, rendered, pairs, [range(len(rendered))]))


@pytest.mark.parametrize("kind", ["shared", "reference"])
@pytest.mark.parametrize("name", PAIRS)
def test_pieces_give_scores_and_gradients_of_one_batch(models, rendered, name, kind):
    conversations, (model, batcher) = rendered[name], models[kind]
    size, largest = batcher.size(conversations), max(batcher.size([item]) for item in conversations)
    with rounding_nowhere():
        scores, gradients, loss = padded_step(models, conversations, PAIRS[name])
        for budget, expected in ((1, len(conversations)), ((largest + size) // 2, None), (size, 1)):
            pieces = batcher.cut(conversations, budget)
            part = part_of(batcher, conversations, PAIRS[name], pieces)
            for piece, inputs in zip(pieces, part["inputs"], strict=True):
                assert size_of(inputs) == batcher.size([conversations[i] for i in piece])
                assert size_of(inputs) <= budget or len(piece) == 1
            assert len(pieces) == expected if expected else 1 < len(pieces) < max(3, len(conversations))
            in_pieces = step(model, part)
            torch.testing.assert_close(in_pieces[0], scores, rtol=1e-10, atol=1e-10)
            assert distance(in_pieces[1], gradients) <= 1e-8
            assert in_pieces[2] == pytest.approx(loss, rel=1e-12)


def test_the_second_forward_repeats_the_dropout():
    layer, dropout = torch.nn.Linear(4, 1), torch.nn.Dropout(0.5)
    part: dict = {"inputs": [{"x": torch.randn(3, 4)}, {"x": torch.randn(2, 4)}], "order": torch.arange(5)}
    part["pairs"] = {"weight": torch.ones(2)}
    ahead, behind, plain = [], [], []

    def forward(inputs):
        return layer(dropout(inputs["x"])).squeeze(-1)

    def score(inputs):
        ahead.append(forward(inputs))
        return ahead[-1]

    passes = passes_of(part, lambda scores, part: scores.square().sum(), torch.no_grad()(score), torch.device("cpu"))
    state = torch.get_rng_state()
    for each in passes:
        plain.append(forward(each.inputs))
    torch.set_rng_state(state)
    for each in passes:
        with each.random_state.again():
            behind.append(forward(each.inputs))
    assert torch.equal(torch.cat(behind), torch.cat(ahead))
    assert not torch.equal(torch.cat(plain), torch.cat(ahead))
    assert torch.equal(torch.get_rng_state(), state), "later batches draw as if nothing had been cut"


def many_answers(count: int) -> Comparison:
    prompt = [Message.of("user", Image(Pillow.new("RGB", (56, 56), "red")), "What colour is it?")]
    answers = [[Message.of("assistant", f"answer {(i + 4) % count}")] for i in range(count)]  # not in their order
    return rated("list", prompt, answers, range(count))


@pytest.mark.parametrize("kind", ["shared", "reference"])
def test_pieces_score_like_the_whole_and_log_once(models, tiny_checkpoint, kind, caplog, monkeypatch):
    model, batcher = models[kind]
    budget = 70 if kind == "shared" else 320
    monkeypatch.setattr("vlmrm.batching.pieces._logged", set())

    def engine(budget: int | None) -> Engine:
        renderer = Renderer(load_processor(tiny_checkpoint))
        return Engine(model, ComparisonCollator(renderer, batcher, 512, max_tokens_per_batch=budget))

    rows = [{"index": i, "comparison": many_answers(count)} for i, count in enumerate((9, 2, 8))]
    with caplog.at_level("INFO", "vlmrm"), torch.no_grad(), rounding_nowhere():
        expected = [row.scores for row in engine(None).rows(rows, batch_size=3)]
        batch = engine(budget).collator(rows)
        scored = [row.scores for row in engine(budget).score_batch(batch)]
    assert sorted(len(part["inputs"]) > 1 for part in batch["parts"]) == [False, True, True]
    for inputs in (inputs for part in batch["parts"] for inputs in part["inputs"]):
        assert size_of(inputs) <= budget
    for a, b in zip(scored, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-10)
    [line] = [record.getMessage() for record in caplog.records if "in pieces" in record.getMessage()]
    assert f"max_tokens_per_batch ({budget})" in line

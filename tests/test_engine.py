"""The one loop: scores in order whatever the budget and the company, errors in their place, one sentence for NaN."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from tests.runs import colour_lists, colour_pairs, text_pairs
from vlmrm.batching import ComparisonCollator, PaddedBatcher
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.engine import Engine, rendered_each, workers_beside
from vlmrm.errors import CheckpointError, MediaError, RowError, ScoreError
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.measures.interventions import INTERVENTIONS, response_only
from vlmrm.modeling import load_processor
from vlmrm.rendering import Rendered, Renderer
from vlmrm.scoring.offline import Shards

SENTENCE = "its score is nan: look for broken weights, or compute in float32"
ALONE = {"response_only": INTERVENTIONS["response_only"]}


class Sums:
    """Scores a conversation with the sum of its token ids, each times its place; those in `broken` with NaN."""

    device = torch.device("cpu")

    def __init__(self, broken=()):
        self.weight = torch.ones((), requires_grad=True)
        self.broken = torch.tensor(broken)
        self.forwards: list[int] = []

    def __call__(self, input_ids, attention_mask, **media):
        self.forwards.append(len(input_ids))
        positions = torch.arange(1, 1 + input_ids.shape[1])
        sums = (input_ids * attention_mask * positions).sum(1).float()  # exact: below 2²⁴
        logits = torch.where(torch.isin(sums, self.broken), torch.nan, sums) * self.weight
        return type("Output", (), {"logits": logits[:, None]})


def score_of(rendered: Rendered) -> float:
    return float(sum(position * token for position, token in enumerate(rendered.input_ids, 1)))


@pytest.fixture(scope="module")
def renderer(tiny_checkpoint):
    return Renderer(load_processor(tiny_checkpoint))


@pytest.fixture
def rows(tmp_path):
    """Pairs with pictures, ranked lists of two to four answers, and pairs without a picture."""
    files = [colour_pairs(tmp_path / "a", 4), colour_lists(tmp_path / "b", 4), text_pairs(tmp_path / "c", 3)]
    return list(load_comparisons([str(file) for file in files], arguments=DataArguments()))


@pytest.fixture
def engine(renderer):
    """`engine(**options)`: with `Sums`, and the options of the collator."""

    def make(broken=(), **options) -> Engine:
        batcher = PaddedBatcher.for_processor(renderer.processor)
        return Engine(Sums(broken), ComparisonCollator(renderer, batcher, **{"max_seq_length": 512, **options}))

    return make


def conversations_of(rows) -> list:
    return [conversation for row in rows for conversation in row["comparison"].conversations()]


@pytest.mark.parametrize(("budget", "most"), [(None, 25), (250, 8), (1, 1)])
def test_scores_keep_order_and_value_under_any_budget(engine, renderer, rows, budget, most):
    conversations = conversations_of(rows)
    expected = [score_of(renderer.render(conversation)) for conversation in conversations]
    assert len(set(expected)) >= len(expected) - 1  # pictures of one size are one to this model
    for seed in range(3):
        order = random.Random(seed).sample(range(len(expected)), len(expected))
        work = engine(max_tokens_per_batch=budget)
        items = rendered_each([conversations[i] for i in order], renderer.render)
        assert work.score(items) == [expected[i] for i in order]
        assert sum(work.model.forwards) == len(expected) and 0 < max(work.model.forwards) <= most
    assert engine().score([]) == []


def test_logits_have_a_gradient_and_scores_need_none(engine, renderer, rows):
    rendered = [renderer.render(conversation) for conversation in conversations_of(rows)]
    work = engine(max_tokens_per_batch=100)
    logits = work.logits(rendered)
    assert logits.squeeze(1).tolist() == [score_of(item) for item in rendered]
    [gradient] = torch.autograd.grad(logits[3, 0], work.model.weight)
    assert gradient.item() == score_of(rendered[3])


def test_an_unrenderable_item_gets_its_error_alone(engine, renderer, rows):
    def render(conversation, cache):
        if conversation is None:
            raise MediaError("a.png does not exist")
        return renderer.render(conversation, cache)

    first, second = conversations_of(rows)[:2]
    outcomes = engine(max_tokens_per_batch=1).score(rendered_each([None, first, None, second], render))
    assert [type(outcome) for outcome in outcomes] == [MediaError, float, MediaError, float]
    assert outcomes[1::2] == [score_of(renderer.render(conversation)) for conversation in (first, second)]


@pytest.mark.parametrize(
    ("device", "cores", "free", "expected"),
    [("cuda", 16, 16, 4), ("cuda", 4, 16, 3), ("cuda", 1, 16, 0), ("cuda", 16, 1, 0), ("cpu", 16, 16, 0)],
)
def test_rows_are_prepared_beside_a_gpu(monkeypatch, device, cores, free, expected):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("vlmrm.engine.disk_usage", lambda folder: SimpleNamespace(free=free * 2**30))
    assert workers_beside(torch.device(device)) == expected
    assert workers_beside(torch.device(device), 7) == 7


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("budget", [None, 60])
def test_every_row_has_branch_scores_or_its_error(engine, renderer, rows, budget, workers):
    rows = [{**row, "sampled": True} for row in rows]
    rows[2]["comparison"] = RowError("no answers", "nobody")
    options = {"max_tokens_per_batch": budget, "bad_rows": "skip", "interventions": ALONE}
    scored_rows = list(engine(**options).rows(rows, batch_size=4, num_workers=workers))
    assert [row.index for row in scored_rows] == [row["index"] for row in rows]
    assert (str(scored_rows[2].error), scored_rows[2].scores) == ("row nobody: no answers", [])
    for row, scored in zip(rows, scored_rows, strict=True):
        if scored.error is None:
            comparison, changed = row["comparison"], response_only(row["comparison"])
            assert scored.id == comparison.id
            assert scored.scores == [
                score_of(renderer.render(conversation)) for conversation in comparison.conversations()
            ]
            expected = [score_of(renderer.render(conversation)) for conversation in changed.conversations()]
            assert scored.altered == {"response_only": expected}
    with pytest.raises(RowError, match="row nobody: no answers"):
        list(engine(**{**options, "bad_rows": "error"}).rows(rows, batch_size=4, num_workers=workers))


def test_a_nonfinite_score_has_one_sentence_everywhere(engine, renderer, rows, tmp_path):
    conversations = conversations_of(rows)
    bad = score_of(renderer.render(rows[1]["comparison"].conversations()[1]))
    work = engine([bad], max_tokens_per_batch=100)

    scores = work.score(rendered_each(conversations, renderer.render))
    assert [number for number, score in enumerate(scores) if isinstance(score, RowError)] == [3]
    assert isinstance(scores[3], ScoreError) and scores[3].reason == SENTENCE

    scored_rows = list(work.rows(rows, batch_size=4))
    assert [str(row.error) for row in scored_rows if row.error is not None] == [f"row pair-1: {SENTENCE}"]
    assert sum(len(row.scores) for row in scored_rows) == len(conversations) - 2, "all but the row's"

    Shards(tmp_path, 100).write(0, scored_rows)
    table = pd.read_parquet(tmp_path / "scores-000000.parquet")
    assert table["error"].dropna().to_dict() == {1: SENTENCE} and table["scores"].isna().sum() == 1

    with pytest.raises(CheckpointError, match=f"^row pair-1: {SENTENCE}.$"):
        evaluate(work, load_comparisons([str(tmp_path / "a/pairs.jsonl")], arguments=DataArguments()), batch_size=2)


def test_a_nonfinite_intervention_score_is_named(engine, renderer, rows):
    rows = [{**row, "sampled": True} for row in rows]
    changed = response_only(rows[0]["comparison"]).conversations()[0]
    work = engine([score_of(renderer.render(changed))], interventions=ALONE)
    first, *remaining = work.rows(rows, batch_size=4)
    assert str(first.error).startswith("row pair-0: its response_only score is nan: look for broken weights")
    assert all(row.error is None for row in remaining)

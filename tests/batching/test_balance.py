"""The estimate of a row's work, and the sampler that spreads it."""

from __future__ import annotations

from PIL import Image as Pillow

from tests.conversations import rated
from tests.runs import colour_lists, logged
from vlmrm.batching.balance import BalancedBatches, estimated_cost, estimated_costs
from vlmrm.conversation import Comparison, Image, Message
from vlmrm.errors import RowError
from vlmrm.rendering import MediaLimits


def row(side: int, text: str = "", image: str | None = None) -> Comparison:
    question = Message.of("user", Image(image or Pillow.new("RGB", (side, side))), text)
    answers = [[Message.of("assistant", "a" * 40)], [Message.of("assistant")]]
    return rated("r", [question], answers, [1, 0])


def test_an_image_counts_once_and_within_its_limits():
    assert estimated_cost(row(280), MediaLimits()) == 1 + 10 + 100
    assert estimated_cost(row(280), MediaLimits(max_pixels=56 * 56)) == 1 + 10 + 4
    assert estimated_cost(row(28, "b" * 80), MediaLimits(min_pixels=56 * 56)) == 1 + 30 + 4


class Rows(list):
    def __getitem__(self, part):
        return {"comparison": list.__getitem__(self, part)}


def test_ranks_get_like_work(tmp_path):
    (tmp_path / "broken.png").write_text("nothing")
    bad = row(28, image=str(tmp_path / "broken.png"))
    rows = Rows([row(side) for side in (28, 280, 56, 308, 84, 336, 112, 252) * 4])
    assert estimated_costs(Rows([RowError("no", "x"), bad, row(28)]), MediaLimits()) == [1, 1, 12]
    costs = estimated_costs(rows, MediaLimits())
    ranks = [list(BalancedBatches(costs, 8, dp_size=2, grad_accum=1, rank=rank, drop_last=False)) for rank in (0, 1)]
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(32))
    for first, second in zip(*ranks, strict=True):
        assert len(first) == len(second) == 4
        sums = [sum(costs[i] for i in batch) for batch in (first, second)]
        assert max(sums) <= 1.35 * min(sums)


def test_a_last_step_repeats_no_row():
    for ranks, accumulated in ((1, 4), (2, 2)):
        steps = [BalancedBatches([1] * 5, 4, ranks, accumulated, rank=rank, drop_last=False) for rank in range(ranks)]
        assert sorted(i for batches in steps for batch in batches for i in batch) == list(range(5))


def test_training_with_it_sees_every_row(train_here, tmp_path):
    data = colour_lists(tmp_path / "data", 12)
    keys = {"per_device_train_batch_size": 3, "max_steps": 4, "save_steps": 4, "report_to": "none"}
    tokens = []
    for name in ("out", "again"):
        train_here(data, name, train_sampling_strategy="batch_rebalance", **keys)
        tokens.append(logged(tmp_path / name / "checkpoint-4", "num_tokens"))
    assert len(tokens[0]) == 4 and tokens[0] == tokens[1]

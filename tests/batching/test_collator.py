"""Comparisons become batches whose pairs point at the right scores, and bad rows are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoProcessor

from tests.conversations import rated
from vlmrm.batching import ComparisonCollator, PaddedBatcher
from vlmrm.batching.collator import OverlongError
from vlmrm.conversation import Comparison, Image, Judgement, Message
from vlmrm.data.comparisons import IrrelevantQueries
from vlmrm.errors import MediaError, RowError
from vlmrm.rendering import Rendered, Renderer
from vlmrm.training.losses import Objective, judged_weights


def comparison(
    row_id: str, answers: dict[str, float], colour: str | None = None, question: str = "What?"
) -> Comparison:
    image = [Image(Pillow.new("RGB", (56, 56), colour))] if colour else []
    prompt = [Message.of("user", *image, question)]
    return rated(row_id, prompt, [[Message.of("assistant", answer)] for answer in answers], list(answers.values()))


def rows(*comparisons) -> list[dict]:
    return [{"index": i, "comparison": c} for i, c in enumerate(comparisons)]


@pytest.fixture(scope="module")
def processor(tiny_checkpoint):
    return AutoProcessor.from_pretrained(tiny_checkpoint)


def collator(processor, **options) -> ComparisonCollator:
    batcher = PaddedBatcher.for_processor(processor)
    return ComparisonCollator(Renderer(processor), batcher, **{"max_seq_length": 256, **options})


def only_part(batch) -> dict:
    [part] = batch["parts"]
    return part


def only_inputs(batch) -> dict:
    [inputs] = only_part(batch)["inputs"]
    return inputs


def answer_texts(processor, batch) -> list[str]:
    texts = processor.tokenizer.batch_decode(only_inputs(batch)["input_ids"], skip_special_tokens=True)
    return [text.split("assistant\n")[-1].strip() for text in texts]


def test_pairs_point_at_better_and_worse_answers(processor):
    ranked = comparison("k", {"worst": 0, "best": 2, "middle": 1}, "red")
    batch = collator(processor)(rows(comparison("p", {"yes": 1, "no": 0}), ranked))
    texts, pairs = answer_texts(processor, batch), only_part(batch)["pairs"]
    named = [(texts[c], texts[r]) for c, r in zip(pairs["chosen"].tolist(), pairs["rejected"].tolist(), strict=True)]
    assert named == [("yes", "no"), ("best", "worst"), ("middle", "worst"), ("best", "middle")]
    assert only_part(batch)["rows"]["branches"].tolist() == [2, 3]
    assert batch["counts"]["pairs"] == 4


def test_several_raters_are_soft_labels(processor):
    """Their pairs have the loss of one pair with the share of the raters as the probability that it wins."""
    raters = [Judgement((0, 1), (1, 0), weight=0.75), Judgement((0, 1), (0, 1), weight=0.25)]
    disputed = replace(comparison("r", {"yes": 1, "no": 0}), judgements=raters)
    batch = collator(processor)(rows(disputed))
    pairs = only_part(batch)["pairs"]
    assert (pairs["chosen"].tolist(), pairs["rejected"].tolist()) == ([0, 1], [1, 0])
    assert pairs["outvoted"].tolist() == [False, True]
    scores = torch.tensor([0.3, -0.9])
    loss = Objective()(scores[:, None], pairs, judged_weights(pairs))["preference"]
    win = torch.sigmoid(scores[0] - scores[1])
    torch.testing.assert_close(loss, -(0.75 * win.log() + 0.25 * (1 - win).log()))
    assert not only_part(collator(processor)(rows(comparison("p", {"yes": 1, "no": 0}))))["pairs"]["outvoted"].any()


def test_a_tie_has_no_margin(processor):
    tied = replace(comparison("t", {"a": 1, "b": 1}), judgements=[Judgement((0, 1), (1, 1), margin=2.0)])
    batch = collator(processor)(rows(tied))
    assert only_part(batch)["pairs"]["tie"].tolist() == [True]
    assert only_part(batch)["pairs"]["margin"].tolist() == [0.0]


def test_padding_is_masked_and_images_follow_their_rows(processor):
    batch = collator(processor)(
        rows(comparison("a", {"y": 1, "a much longer answer": 0}, "red"), comparison("b", {"1": 1, "2": 0}))
    )
    inputs = only_inputs(batch)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == inputs["mm_token_type_ids"].shape
    assert inputs["image_grid_thw"].shape == (2, 3)
    image_tokens = (inputs["mm_token_type_ids"] == 1).sum(1).tolist()
    assert image_tokens[0] == image_tokens[1] > 0 and image_tokens[2:] == [0, 0]
    assert (inputs["mm_token_type_ids"][inputs["attention_mask"] == 0] == 0).all()


def test_an_overlong_row_is_dropped_by_name(processor):
    long, short = comparison("long", {"x " * 300: 1, "y": 0}), comparison("short", {"x": 1, "y": 0})
    batch = collator(processor, overlong="drop")(rows(long, short))
    assert [(index, error.row_id) for index, error in batch["dropped"]] == [(0, "long")]
    assert only_part(batch)["rows"]["index"].tolist() == [1]
    with pytest.raises(OverlongError, match=r"row long: .*max_seq_length 256"):
        collator(processor, overlong="error")(rows(long, short))


def test_an_overlong_answer_is_trimmed_and_stays_in(processor):
    batch = collator(processor, overlong="trim")(rows(comparison("long", {"x " * 300: 1, "y": 0}, "red")))
    assert batch["dropped"] == []
    assert only_inputs(batch)["input_ids"].shape[1] <= 256
    same_start = comparison("same", {"x " * 300 + "a": 1, "x " * 300 + "b": 0})
    dropped = collator(processor, overlong="trim")(rows(same_start))["dropped"]
    assert "differ only past max_seq_length" in dropped[0][1].reason


def test_a_bad_image_stops_or_is_skipped(processor, tmp_path):
    (tmp_path / "empty.jpg").touch()
    good = comparison("bad", {"x": 1, "y": 0})
    bad = replace(good, prompt=[Message.of("user", Image(str(tmp_path / "empty.jpg")), "What?")])
    with pytest.raises(MediaError, match=r"row bad: .*empty\.jpg"):
        collator(processor)(rows(bad))
    batch = collator(processor, bad_rows="skip")(rows(bad, comparison("ok", {"x": 1, "y": 0})))
    assert only_part(batch)["rows"]["index"].tolist() == [1]
    [(_, error)] = batch["dropped"]
    assert isinstance(error, MediaError) and error.row_id == "bad"


def test_a_batch_of_only_bad_rows_still_steps(processor):
    batch = collator(processor, bad_rows="skip")(rows(RowError("no answers", "r1")))
    assert only_inputs(batch)["input_ids"].shape[0] == 1
    assert only_part(batch)["pairs"]["chosen"].shape == (0,)
    assert [(index, str(error)) for index, error in batch["dropped"]] == [(0, "row r1: no answers")]


def test_irrelevant_answers_stand_under_another_prompt(processor):
    red = comparison("red", {"r": 1, "s": 0}, "red", "Red?")
    blue = comparison("blue", {"b": 1, "c": 0}, "blue", "Blue?")
    batch = collator(processor, irrelevant=IrrelevantQueries(1, 0, rows(red, blue)))(rows(red, blue))
    texts = processor.tokenizer.batch_decode(only_inputs(batch)["input_ids"], skip_special_tokens=True)
    added = [i for i, is_irrelevant in enumerate(only_part(batch)["pairs"]["irrelevant"].tolist()) if is_irrelevant]
    assert len(added) == 2
    chosen = {texts[only_part(batch)["pairs"]["chosen"][i]] for i in added}
    assert any("Blue?" in text and text.split("assistant\n")[-1].strip() == "r" for text in chosen)
    assert any("Red?" in text and text.split("assistant\n")[-1].strip() == "b" for text in chosen)
    assert only_part(batch)["rows"]["branches"].sum() == 4
    assert only_inputs(batch)["image_grid_thw"].shape[0] == 8


def test_a_tie_sets_both_answers_under_another_prompt(processor):
    tied = comparison("t", {"r": 1, "s": 1}, "red")
    queries = IrrelevantQueries(1, 0, [{"comparison": comparison("blue", {"b": 1, "c": 0}, "blue")}])
    texts = answer_texts(processor, collator(processor, irrelevant=queries)(rows(tied)))
    assert texts == ["r", "s", "r", "s"]


def test_a_lone_prompt_gets_irrelevant_queries_from_data(processor):
    red, blue = comparison("red", {"r": 1, "s": 0}, "red"), comparison("blue", {"b": 1, "c": 0}, "blue")
    queries = IrrelevantQueries(1, 0, [{"comparison": red}, {"comparison": blue}])
    for _ in range(3):
        batch = collator(processor, irrelevant=queries)(rows(red))
        assert only_part(batch)["pairs"]["irrelevant"].tolist() == [False, True]
    first, _, second, _ = only_inputs(batch)["pixel_values"].chunk(4)
    assert not torch.equal(first, second)


def test_donors_never_share_the_image_nor_mix_kinds():
    red = comparison("a", {"r": 1, "s": 0}, "red", "One?")
    same_image = comparison("b", {"r": 1, "s": 0}, "red", "Two?")
    text_only = comparison("c", {"r": 1, "s": 0}, None, "Three?")
    queries = IrrelevantQueries(1, 0, [{"comparison": c} for c in (red, same_image, text_only)])
    assert queries.donors(red, [red, same_image, text_only], epoch=0) == []
    assert queries.donors(text_only, [red, text_only], epoch=0) == []


def test_donors_are_chosen_by_seed_epoch_and_row():
    pool = [comparison(str(i), {"r": 1, "s": 0}, None, f"Question {i}?") for i in range(20)]
    queries = IrrelevantQueries(2, 7, [{"comparison": c} for c in pool])
    again = IrrelevantQueries(2, 7, [{"comparison": c} for c in pool])
    assert queries.donors(pool[0], pool, 0) == again.donors(pool[0], pool, 0)
    assert len(queries.donors(pool[0], pool[:1], 0)) == 2
    assert any(queries.donors(pool[0], pool, epoch) != queries.donors(pool[0], pool, 0) for epoch in range(1, 5))


def test_a_token_budget_splits_batches_keeping_every_pair(processor):
    comparisons = [comparison(str(i), {"y": 1, "n": 0}, colour) for i, colour in enumerate(("red", "green", "blue"))]
    queries = IrrelevantQueries(1, 0, rows(*comparisons))
    unsplit = collator(processor, irrelevant=queries)(rows(*comparisons))
    split = collator(processor, irrelevant=queries, max_tokens_per_batch=1)
    parts = split(rows(*comparisons))["parts"]
    assert len(parts) == 3
    assert sorted(index for part in parts for index in part["rows"]["index"].tolist()) == [0, 1, 2]
    assert sum(len(part["pairs"]["chosen"]) for part in parts) == len(only_part(unsplit)["pairs"]["chosen"]) == 6
    assert split.empty_part()["pairs"]["chosen"].shape == (0,)


def test_padded_parts_hold_each_unit_once_within_budget():
    lengths = [5, 100, 7, 7, 30, 1, 64]
    units = [[Rendered([0] * length, [0] * length)] for length in lengths]
    for budget in (1, 64, 128, 10**4):
        parts = PaddedBatcher(0, False).split(units, budget)
        assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
        for part in parts:
            assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget
    assert len(PaddedBatcher(0, False).split(units, 10**4)) == 1


def test_scores_of_pieces_are_put_back_in_order(processor, monkeypatch):
    """A cycle of three, which is not its own inverse."""
    answers = comparison("0", {"a": 3, "b": 2, "c": 1}, question="Which?")
    whole = answer_texts(processor, collator(processor)(rows(answers)))
    monkeypatch.setattr(PaddedBatcher, "cut", lambda self, rendered, budget: [[1], [2], [0]])

    part = only_part(collator(processor, max_tokens_per_batch=1)(rows(answers)))

    texts = [text for inputs in part["inputs"] for text in processor.tokenizer.batch_decode(inputs["input_ids"])]
    assert [answer in texts[place] for answer, place in zip(whole, part["order"].tolist(), strict=True)] == [True] * 3

"""Collate comparisons into a batch: conversations as model inputs, and which scores to compare.

A batch is a dictionary that the trainer moves to the device as it is:

    parts    of comparisons; a single part, unless a token budget splits the batch:
        inputs   the model's keywords of each forward: one, unless the part is a comparison that alone is over the
                 budget; a forward answers one score for each of its conversations
        order    [N] which of the forwards' scores, one after another, is each score of the part
        cut      tokens and patches of a part of several forwards: what they would be in one, and what they are
        pairs    [N] tensors over what is judged: the pairs of conversations chosen and rejected (indices), with their
                 margin, weight, tie, irrelevant, and the number of their output; of a rating both are the one that is
                 rated, and its share of the output's range is the target
        rows     of the comparisons [R]: index (in the data set), branches (number of their own scores), id (a list)
        altered  (index, name of the intervention, number of scores) of each altered comparison
    counts   numbers for the logs: tokens, pairs
    dropped  (index, error) of each row left out; the error names the row

In a part the scores of the comparisons' own branches come first, in order, then those of altered comparisons, then
those of irrelevant queries and those of critiques, which nothing compares.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict

import numpy as np
import torch

from vlmrm.batching.media import join
from vlmrm.conversation import Comparison, Conversation, Judgement, Message, agreed_pairs
from vlmrm.data.comparisons import IrrelevantQueries, best_and_worst
from vlmrm.errors import RowError, VlmrmError
from vlmrm.measures.interventions import Intervention, alterations
from vlmrm.outputs import ONE, Outputs
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer

# The reference batch: one padded row per conversation, each with its own copy of every image.
#
# Slow and plain: the oracle that the shared batch is tested against.


# Conversations that stay in one forward where the budget allows: of one comparison, whose scores are compared.
Unit = Sequence[Rendered]


def branches_of(rendered: Iterable[Rendered]) -> list[Rendered]:
    """Return the branches of all conversations, one after another: what a batch of them computes."""
    return [branch for item in rendered for branch in item.branches]


class Batcher(Protocol):
    """Turns conversations into model inputs, and splits a batch by a token budget."""

    def __call__(self, rendered: Sequence[Rendered]) -> dict[str, Any]:
        """Return the inputs of a model that answers one score for each conversation, in order."""
        ...

    def split(self, units: Sequence[Unit], budget: int) -> list[list[int]]:
        """Return indices of `units` in parts of at most `budget` tokens and patches; a larger unit goes alone."""
        ...

    def cut(self, unit: Unit, budget: int) -> list[list[int]]:
        """Return indices of a unit's conversations in pieces of at most `budget`; a larger one is its own piece."""
        ...

    def size(self, rendered: Sequence[Rendered]) -> int:
        """Return the tokens and patches that are computed for conversations in one forward."""
        ...


@dataclass(frozen=True)
class PaddedBatcher:
    """Pads conversations on the right: `input_ids` [B, T], `attention_mask` [B, T], and all pixels in order."""

    pad_token_id: int
    type_names: Sequence[str] = ("mm_token_type_ids",)  # under which the model takes `Rendered.type_ids`
    positions: Callable[[Rendered], torch.Tensor] | None = None  # [3, T], where the model's own are not to be had

    @classmethod
    def for_processor(
        cls,
        processor: Any,
        type_names: Sequence[str] | None = None,
        positions: Callable[[Rendered], torch.Tensor] | None = None,
    ) -> PaddedBatcher:
        """Return the batcher for a processor, and for a model's `type_names` and `positions`."""
        tokenizer = processor.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if type_names is None:
            type_names = [name for name in ("mm_token_type_ids",) if name in processor.model_input_names]
        return cls(pad, type_names, positions)

    def __call__(self, rendered: Sequence[Rendered]) -> dict[str, torch.Tensor]:
        length = max(map(len, rendered))
        inputs = {
            "input_ids": _pad([item.input_ids for item in rendered], length, self.pad_token_id),
            "attention_mask": _pad([[1] * len(item) for item in rendered], length, 0),
        }
        for name in self.type_names:
            inputs[name] = _pad([item.type_ids for item in rendered], length, 0)
        if self.positions is not None:
            axes = zip(*(self.positions(item).tolist() for item in rendered), strict=True)
            inputs["position_ids"] = torch.stack([_pad(rows, length, 0) for rows in axes])
        inputs |= taught_tokens(rendered, lambda row: length * row + np.arange(len(rendered[row].input_ids)))
        return inputs | join([medium for item in rendered for medium in item.media])

    def split(self, units: Sequence[Unit], budget: int) -> list[list[int]]:
        """Return parts under the budget, padding included; units of similar length go together."""
        parts: list[list[int]] = []
        width = rows = patches = 0
        # Longest first: the first unit of a part sets its padded width.
        for index in sorted(range(len(units)), key=lambda i: -max(map(len, units[i]))):
            unit = units[index]
            unit_patches = sum(map(_patches, unit))
            if not parts or width * (rows + len(unit)) + patches + unit_patches > budget:
                parts.append([])
                width, rows, patches = max(map(len, unit)), 0, 0
            parts[-1].append(index)
            rows, patches = rows + len(unit), patches + unit_patches
        return parts

    def cut(self, unit: Unit, budget: int) -> list[list[int]]:
        """Return pieces under the budget, padding included; conversations of similar length go together."""
        return self.split([[item] for item in unit], budget)

    def size(self, rendered: Sequence[Rendered]) -> int:
        return max(map(len, rendered)) * len(rendered) + sum(map(_patches, rendered))


def taught_tokens(rendered: Sequence[Rendered], places: Callable[[int], np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the tokens of critiques, `taught_ids` [M], and where the token before each stands, `taught_places`.

    `places` are those of a conversation's tokens, by its number.
    """
    before = [places(i)[-1 - item.taught : -1] for i, item in enumerate(rendered) if item.taught]
    ids = [token for item in rendered if item.taught for token in item.input_ids[-item.taught :]]
    if not before:
        return {}
    return {"taught_places": torch.from_numpy(np.concatenate(before)), "taught_ids": torch.tensor(ids)}


def _patches(item: Rendered) -> int:
    return sum(medium.patches for medium in item.media)


def _pad(rows: Sequence[Sequence[int]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.long)


logger = logging.getLogger("vlmrm")


class Forwards(TypedDict):
    """What computes a part's scores: one forward, or the pieces of a comparison that was cut."""

    inputs: list[dict[str, Any]]
    order: torch.Tensor
    cut: tuple[int, int]


class Part(Forwards):
    """Hold comparisons that are scored together; the top of this file describes the keys."""

    pairs: dict[str, torch.Tensor]
    rows: dict[str, Any]
    altered: list[tuple[int, str, int]]


class Batch(TypedDict):
    """Comparisons in parts, with counts for the logs and the rows that were dropped."""

    parts: list[Part]
    counts: dict[str, int]
    dropped: list[tuple[int, RowError]]


# Of the tensors in a part's `pairs`.
PAIR_TYPES = {
    "chosen": torch.long,
    "rejected": torch.long,
    "margin": torch.float32,
    "weight": torch.float32,
    "tie": torch.bool,
    "irrelevant": torch.bool,
    "outvoted": torch.bool,  # of a rater whom the mean of all contradicts: in the loss, but not in the accuracy
    "output": torch.long,
    "target": torch.float32,  # NaN of a pair
}

KILLED_WORKER = (
    "a DataLoader worker was killed, most likely for want of memory: lower dataloader_num_workers or max_pixels, and "
    "resume from the last checkpoint where there is one."
)
IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")  # how torch begins the error of a worker

CRITICISE = "Criticise the answer."  # the turn before a critique
# Stands in for a batch whose rows were all dropped: every rank must run its step, or the others would wait for it.
PLACEHOLDER = Conversation((Message.of("user", "-"),))


@dataclass
class ComparisonCollator:
    """Collates rows `{"index", "comparison"}`. Runs in DataLoader workers: media are opened and processed here."""

    renderer: Renderer
    batcher: Batcher
    max_seq_length: int
    max_tokens_per_batch: int | None = None
    overlong: str | None = None  # drop
    bad_rows: str = "error"
    critique_weight: float = 0.0  # of the loss of critiques, which are read above 0
    irrelevant: IrrelevantQueries | None = None
    outputs: Outputs = ONE
    # By name, what to score beside a comparison. Rows with a key `sampled` are altered, and may have `donors`.
    interventions: Mapping[str, Intervention] = field(default_factory=dict)
    # In shared memory, so that workers see the epoch that the trainer sets.
    epoch: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.long).share_memory_())

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        cache: dict[str, ProcessedMedia] = {}
        units: list[_RenderedComparison] = []
        dropped: list[tuple[int, RowError]] = []
        for row in rows:
            comparison = row["comparison"]
            try:
                if isinstance(comparison, RowError):
                    raise comparison
                unit = _RenderedComparison(row["index"], comparison, self._render(comparison, cache))
                unit.critiques = self._critiques(comparison, cache) if self.critique_weight else []
                if "sampled" in row:
                    unit.altered = self._alter(row, cache)
                units.append(unit)
            except RowError as error:
                named = error if error.row_id is not None else type(error)(error.reason, comparison.id)
                policy = self.overlong if isinstance(error, OverlongError) else self.bad_rows
                if policy == "error":
                    raise named from error
                dropped.append((row["index"], named))
        if self.irrelevant is not None:
            self._add_irrelevant(units, self.irrelevant, cache)
        conversations = [unit.conversations() for unit in units]
        return {
            "parts": [self._part([units[i] for i in indices]) for indices in self.split(conversations)],
            "counts": {
                "tokens": sum(len(item) for unit in conversations for item in branches_of(unit)),
                "pairs": sum(len(unit.comparison.pairs()) for unit in units),
            },
            "dropped": dropped,
        }

    def empty_part(self) -> Part:
        """Return a part without pairs, for a rank that has run out of parts while others have not."""
        return self._part([])

    def split(self, conversations: Sequence[Unit]) -> list[list[int]]:
        """Return the indices of each part's conversations; without a budget there is one part."""
        if self.max_tokens_per_batch is None or not conversations:
            return [list(range(len(conversations)))]
        return self.batcher.split([branches_of(unit) for unit in conversations], self.max_tokens_per_batch)

    def _part(self, units: Sequence[_RenderedComparison]) -> Part:
        rendered = [item for unit in units for item in unit.branches]
        pairs: list[tuple[Any, ...]] = []  # in the order of PAIR_TYPES
        start = 0
        for unit in units:
            pairs += self._judged(unit.comparison, start)
            start += len(unit.branches)
        altered = [(unit.index, name, len(items)) for unit in units for name, items in unit.altered.items()]
        rendered += [item for unit in units for items in unit.altered.values() for item in items]
        for better, worse, weight in (pair for unit in units for pair in unit.irrelevant):
            pairs.append((len(rendered), len(rendered) + 1, 0.0, weight, True, True, False, 0, math.nan))
            rendered += [better, worse]
        rendered += [item for unit in units for item in unit.critiques]
        columns = list(zip(*pairs, strict=True)) or [()] * len(PAIR_TYPES)
        return {
            # `split` keeps several units within the budget: only one that is alone can be over it.
            **self._forwards(rendered or [self.renderer.render(PLACEHOLDER)], whole=len(units) != 1),
            "pairs": {
                name: torch.tensor(column, dtype=dtype)
                for (name, dtype), column in zip(PAIR_TYPES.items(), columns, strict=True)
            },
            "rows": {
                "index": torch.tensor([unit.index for unit in units], dtype=torch.long),
                "branches": torch.tensor([len(unit.branches) for unit in units], dtype=torch.long),
                "id": [unit.comparison.id for unit in units],
            },
            "altered": altered,
        }

    def _judged(self, comparison: Comparison, start: int) -> Iterator[tuple[Any, ...]]:
        """Yield what judgements say of a comparison's branches, which begin at `start`, in rows of `PAIR_TYPES`."""
        by_output: dict[int, list[tuple[Judgement, list[float] | None]]] = {}
        for judgement in comparison.judgements:
            output, targets = self.outputs.targets(judgement)
            by_output.setdefault(output, []).append((judgement, targets))
        for output, judged in by_output.items():
            agreed = {*agreed_pairs([judgement for judgement, _ in judged])}
            for judgement, targets in judged:
                for answer, target in zip(judgement.answers, targets or (), strict=targets is not None):
                    branch = start + answer
                    yield branch, branch, 0.0, judgement.weight, False, False, False, output, target
                for pair in judgement.pairs() if targets is None else ():
                    margin = 0.0 if pair.tie or judgement.margin is None else judgement.margin
                    both, outvoted = (start + pair.chosen, start + pair.rejected), not pair.tie and pair not in agreed
                    yield *both, margin, judgement.weight, pair.tie, False, outvoted, output, math.nan

    def _forwards(self, rendered: list[Rendered], whole: bool) -> Forwards:
        """Return the forwards of a part's conversations: one, or pieces where they are over the budget."""
        budget = self.max_tokens_per_batch
        pieces = [list(range(len(rendered)))]
        if budget is not None and not whole:
            apart = len(self.outputs.branches) > 1  # branches of one conversation stay in one piece
            cut = self.split([[it] for it in rendered]) if apart else self.batcher.cut(rendered, budget)
            pieces = cut if len(cut) > 1 else pieces
        parts = [branches_of(rendered[i] for i in piece) for piece in pieces]
        sizes = [self.batcher.size(branches_of(rendered)), *map(self.batcher.size, parts)] if len(parts) > 1 else [0]
        return {
            "inputs": [self.batcher(part) for part in parts],
            # The inverse permutation: where score i of the part stands among the forwards' scores.
            "order": torch.tensor([i for piece in pieces for i in piece]).argsort(),
            "cut": (sizes[0], sum(sizes[1:])),
        }

    def _render(self, comparison: Comparison, cache: dict[str, ProcessedMedia]) -> list[Rendered]:
        """Return the conversations of a comparison, each within `max_seq_length`."""
        branches = [self.fit(item, cache, comparison.id) for item in comparison.conversations()]
        # Trimming may have cut off the part in which two answers differ.
        if self.overlong == "trim" and any(_same(branches[i], branches[j]) for i, j, _ in comparison.pairs()):
            raise OverlongError(
                "its answers differ only past max_seq_length: raise it or lower max_pixels", comparison.id
            )
        return branches

    def _critiques(self, comparison: Comparison, cache: dict[str, ProcessedMedia]) -> list[Rendered]:
        """Return the conversations that go on from an answer to its critique."""
        written = []
        for answer, critique in zip(comparison.answers, comparison.critiques, strict=False):
            if critique:
                turns = Message.of("user", CRITICISE), Message.of("assistant", critique)
                conversation = Conversation((*comparison.prompt, *answer, *turns))
                rendered = self.fit(conversation, cache, comparison.id)
                before = self.renderer.prompt_tokens(conversation, rendered)
                written.append(replace(rendered, taught=len(rendered.input_ids) - before))
        return written

    def _alter(self, row: Mapping[str, Any], cache: dict[str, ProcessedMedia]) -> dict[str, list[Rendered]]:
        """Return the conversations of each intervention that applies to this row and fits."""
        altered = {}
        comparison, limits = row["comparison"], self.renderer.limits
        frames = (limits.video_fps, limits.video_max_frames)
        changes = alterations(
            comparison, row.get("donors", ()), self.interventions.values(), sampled=row["sampled"], frames=frames
        )
        for intervention, changed in changes:
            try:
                altered[intervention.name] = [
                    self.fit(conversation, cache, comparison.id) for conversation in changed.conversations()
                ]
            except RowError as error:  # the donor's image cannot be opened, or is too large
                logger.debug("row %s has no %s: %s", comparison.id, intervention.name, error)
        return altered

    def fit(self, conversation: Conversation, cache: dict[str, ProcessedMedia], row_id: str | None = None) -> Rendered:
        """Return a conversation as tokens, within `max_seq_length`."""
        rendered = self.renderer.render(conversation, cache)
        if len(rendered) <= self.max_seq_length:
            return rendered
        trimmed = self.renderer.trim(conversation, self.max_seq_length, cache) if self.overlong == "trim" else None
        if trimmed is None:
            raise OverlongError(
                f"{len(rendered)} tokens are over max_seq_length {self.max_seq_length}: raise it or lower max_pixels",
                row_id,
            )
        return trimmed

    def _add_irrelevant(
        self, units: Sequence[_RenderedComparison], irrelevant: IrrelevantQueries, cache: dict[str, ProcessedMedia]
    ) -> None:
        """Add each comparison's best and worst answer under the prompts of donors.

        Where the donor is in the batch, the pair joins the donor's unit: a shared batch then computes the prompt once.
        """
        epoch = int(self.epoch)
        comparisons = [unit.comparison for unit in units]
        unit_of = {id(unit.comparison): unit for unit in units}
        for unit in units:
            if len(unit.comparison.answers) < 2:
                continue
            answers = [unit.comparison.answers[i] for i in best_and_worst(unit.comparison)]
            for donor in irrelevant.donors(unit.comparison, comparisons, epoch):
                try:
                    better, worse = (
                        self.fit(Conversation((*donor.prompt, *answer)), cache, unit.comparison.id)
                        for answer in answers
                    )
                except RowError as error:  # the donor's fault: it is reported as a row of its own
                    logger.debug("no irrelevant query for row %s: %s", unit.comparison.id, error)
                    continue
                unit_of.get(id(donor), unit).irrelevant.append((better, worse, unit.comparison.judgement.weight))


class OverlongError(RowError):
    """A conversation over `max_seq_length`."""


@dataclass
class _RenderedComparison:
    """One comparison's conversations, those of its interventions, and its irrelevant pairs (better, worse, weight)."""

    index: int
    comparison: Comparison
    branches: list[Rendered]
    irrelevant: list[tuple[Rendered, Rendered, float]] = field(default_factory=list)
    altered: dict[str, list[Rendered]] = field(default_factory=dict)
    critiques: list[Rendered] = field(default_factory=list)

    def conversations(self) -> list[Rendered]:
        irrelevant = [item for better, worse, _ in self.irrelevant for item in (better, worse)]
        altered = [item for items in self.altered.values() for item in items]
        return [*self.branches, *altered, *irrelevant, *self.critiques]


def _same(a: Rendered, b: Rendered) -> bool:
    return a.input_ids == b.input_ids and [m.key for m in a.media] == [m.key for m in b.media]


@contextmanager
def plain_worker_errors() -> Generator[None]:
    """Turn the errors of DataLoader workers into one sentence again: torch adds the whole traceback."""
    try:
        yield
    except VlmrmError as error:
        message = str(error)
        if not IN_WORKER.match(message):
            raise
        # The last line of the worker's traceback is `module.Class: the sentence`.
        raise type(error)(message.strip().splitlines()[-1].partition(": ")[2]) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise VlmrmError(KILLED_WORKER) from error
    except (EOFError, ConnectionError) as error:  # it was killed while it handed over a batch
        raise VlmrmError(KILLED_WORKER) from error

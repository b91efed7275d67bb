"""Rows scored by anything that answers conversations: interventions are applied here, and nothing is asked twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachetools import LRUCache
from torch.utils.data import DataLoader

from vlmrm.batching.collator import OverlongError, plain_worker_errors
from vlmrm.conversation import Comparison, Conversation, Message, Part, Text
from vlmrm.data.media import messages_key
from vlmrm.engine import ScoredRow, checked
from vlmrm.errors import WEIGHTS, MediaError, RewardError, RowError, ScoreError
from vlmrm.evaluation.entry import SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.measures.interventions import INTERVENTIONS, alterations

KEPT = 2**20  # scores


class Compared(NamedTuple):
    """The scores of the answers of one comparison, with the `verdicts` of `ScoredRow` if pairs were judged."""

    scores: list[float]
    verdicts: Mapping[tuple[int, int], tuple[float, float]] = {}


class ConversationScorer(ABC):
    """An open entry that is asked for the scores of conversations; a subclass says how.

    A row that it cannot score is left out with `bad_rows: skip` (`overlong: drop` for one that is too long), and is
    its error otherwise. An altered row that it cannot score is counted under its intervention.
    """

    sees: frozenset[str] = frozenset({"image", "video"})  # the kinds of media that it is shown
    compares: bool = False  # a score depends on the other answers of the comparison

    def __init__(self, name: str, run: SweepRun):
        self.name, self.args, self.reading = name, run.args, run.data_args
        run.closed.clear()  # the memory of the checkpoint before is free
        self.limits = limits_of(run.args.interventions, compares=self.compares)
        self._outcomes: LRUCache[Any, Any] = LRUCache(KEPT)  # by key of a conversation, or of a group if it compares

    @property
    def interventions(self) -> list[str]:
        return [name for name in self.args.interventions if name not in self.limits]

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        """Return the score of each conversation, or why it has none."""
        raise NotImplementedError

    def score_groups(self, groups: Sequence[Sequence[Conversation]]) -> list[Compared | RowError]:
        """Return the scores of each group, the answers of one comparison; asked for where it `compares`."""
        raise NotImplementedError

    @abstractmethod
    def origin(self) -> Origin: ...

    def close(self) -> None:
        """Forget the scores; a subclass closes its connections."""
        self._outcomes.clear()

    def rows(self, dataset: Any, *, batch_size: int, num_workers: int = 0) -> Iterator[ScoredRow]:
        """Yield the scores of the rows, and of each row altered; `num_workers` processes read rows ahead."""
        with plain_worker_errors():
            for rows in DataLoader(dataset, batch_size=batch_size, collate_fn=list, num_workers=num_workers):
                units = [self._unit(row) for row in rows]
                self._ask([group for unit in units for group in unit.groups.values()])
                yield from map(self._scored, units)

    def _unit(self, row: Mapping[str, Any]) -> _AskedRow:
        comparison = row["comparison"]
        if isinstance(comparison, RowError):
            if self.reading.bad_rows == "error":
                raise comparison
            return _AskedRow(row["index"], comparison.row_id or "", error=comparison)
        unit = _AskedRow(row["index"], comparison.id)
        try:
            unit.groups[None], blind = self._shown(comparison)
        except RowError as error:
            unit.error = self._dropped(error, comparison.id)
            return unit
        if "sampled" not in row:
            return unit
        chosen = [INTERVENTIONS[name] for name in self.interventions]
        options = {"sampled": row["sampled"], "together": self.compares}
        options["frames"] = self.reading.video_fps, self.reading.video_max_frames
        for intervention, changed in alterations(comparison, row.get("donors", ()), chosen, **options):
            name = intervention.name
            try:
                group, _ = self._shown(changed)
            except RowError as error:
                unit.failed[name] = error.reason
                continue
            plain = unit.groups[None]
            if blind and group.keys == plain.keys:
                unit.failed[name] = "it changes nothing that this scorer is shown"
            elif not (intervention.attack and self.compares):
                unit.groups[name] = group
            elif len(group.keys) == 2:
                unit.groups[name, 0] = _ConversationGroup.of([group.conversations[0], plain.conversations[1]])
                unit.groups[name, 1] = _ConversationGroup.of([plain.conversations[0], group.conversations[1]])
            else:
                unit.failed[name] = "it compares answers, and a list has no pair to change one answer of"
        return unit

    def _shown(self, comparison: Comparison) -> tuple[_ConversationGroup, bool]:
        """Return the conversations as the scorer is shown them, and whether media are left out."""
        conversations = comparison.conversations()
        media = [medium for c in conversations for message in c.messages for medium in message.media]
        unseen = next((medium.kind for medium in media if medium.kind not in self.sees), None)
        if unseen is None:
            return _ConversationGroup.of(conversations), False
        kind = "an image" if unseen == "image" else "a video"
        if not self.args.scorer_drops_media:
            raise RewardError(
                f"{self.name} cannot see what row {comparison.id} shows, {kind}: evaluate it on rows without, or "
                "score the texts alone with scorer_drops_media: true."
            )
        conversations = [
            Conversation(tuple(Message(m.role, tuple(filter(self._seen, m.content))) for m in conversation.messages))
            for conversation in conversations
        ]
        if not all(conversation.answer.content for conversation in conversations):
            raise RewardError(f"{self.name} cannot see an answer of row {comparison.id}, which is {kind} alone.")
        return _ConversationGroup.of(conversations), True

    def _seen(self, part: Part) -> bool:
        return isinstance(part, Text) or part.kind in self.sees

    def _ask(self, groups: Sequence[_ConversationGroup]) -> None:
        """Ask for what has not been asked yet."""
        if self.compares:
            missing = {group.keys: group for group in groups if group.keys not in self._outcomes}
            answers: Sequence[Any] = self.score_groups([group.conversations for group in missing.values()])
        else:
            pairs = (pair for group in groups for pair in zip(group.keys, group.conversations, strict=True))
            missing = {key: conversation for key, conversation in pairs if key not in self._outcomes}
            answers = self.score_each(list(missing.values()))
        self._outcomes.update(zip(missing, answers, strict=True))

    def _scored(self, unit: _AskedRow) -> ScoredRow:
        if unit.error is not None:
            return ScoredRow(unit.index, unit.id, error=unit.error)
        answers: dict[Any, Compared | RowError] = {
            name: self._outcomes[group.keys]
            if self.compares
            else compared(map(self._outcomes.__getitem__, group.keys))
            for name, group in unit.groups.items()
        }
        plain = answers.pop(None)
        if isinstance(plain, RowError):
            return ScoredRow(unit.index, unit.id, error=self._dropped(plain, unit.id))
        row = ScoredRow(unit.index, unit.id, plain.scores, verdicts=plain.verdicts, failed=unit.failed)
        attacks: dict[str, dict[int, float]] = {}
        for key, answer in answers.items():
            name, branch = key if isinstance(key, tuple) else (str(key), None)
            if isinstance(answer, RowError):
                row.failed[name] = answer.reason
            elif branch is None:
                row.altered[name] = INTERVENTIONS[name].in_branches(answer.scores)
            else:
                # So that the other answer, as it is, leads by what it led by when the two were compared.
                lead = answer.scores[1 - branch] - answer.scores[branch]
                attacks.setdefault(name, {})[branch] = plain.scores[1 - branch] - lead
        row.altered.update({name: [of[0], of[1]] for name, of in attacks.items() if name not in row.failed})
        row = checked(row)
        if isinstance(row.error, ScoreError):  # weights of ours would be broken; of another scorer it is the row
            error = RowError(row.error.reason.removesuffix(WEIGHTS))
            return ScoredRow(unit.index, unit.id, error=self._dropped(error, unit.id))
        return row

    def _dropped(self, error: RowError, row_id: str) -> RowError:
        """Return the error of a row that may be left out."""
        named = type(error)(error.reason, row_id)
        policy = self.reading.overlong if isinstance(error, OverlongError) else self.reading.bad_rows
        if policy in ("skip", "drop", None):
            return named
        if isinstance(error, MediaError):
            raise named
        raise RewardError(f"{self.name} has no score for row {row_id}: {error.reason}.")


def compared(scores: Iterable[float | RowError]) -> Compared | RowError:
    """Return the scores of a comparison's answers, or the error of the first that has none."""
    found = []
    for score in scores:
        if isinstance(score, RowError):
            return score
        found.append(score)
    return Compared(found)


def limits_of(interventions: Iterable[str], *, compares: bool) -> dict[str, str]:
    """Return why a scorer that scores each answer alone cannot do some of the interventions."""
    orders = [name for name in interventions if INTERVENTIONS[name].family == "order" and not compares]
    return dict.fromkeys(orders, "it scores each answer alone, whatever their order")


class _ConversationGroup(NamedTuple):
    """The conversations of one comparison, and their keys."""

    conversations: list[Conversation]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, conversations: list[Conversation]) -> _ConversationGroup:
        return cls(conversations, tuple(messages_key(it.messages) for it in conversations))


@dataclass
class _AskedRow:
    """A row: its conversations as they are, under None, and under the name of each intervention.

    Of an attack on a pair that is compared, one answer is changed at a time: under the name and the answer's number.
    """

    index: int
    id: str
    groups: dict[str | tuple[str, int] | None, _ConversationGroup] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    error: RowError | None = None


def origin_of(digest: str | None, *, device: str | None = None, dtype: str | None = None, **details: str) -> Origin:
    """Return the origin of the scores of something that is no checkpoint of ours."""
    return {
        "weights": digest,
        "device": device,
        "dtype": dtype,
        "attention": None,
        "chat_template_sha256": None,
        "checkpoint": {},
        "scorer": details,
    }

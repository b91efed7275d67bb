"""The shared batch: one packed row that computes common prefixes and images once, with the scores of the padded batch.

Conversations become a tree of token segments. Every token keeps the id and the rotary position that it has in its own
conversation; the vision tower encodes each distinct image once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from vlmrm.batching.collator import Unit, taught_tokens
from vlmrm.batching.media import Media, distinct_media, join, placeholders_in
from vlmrm.batching.pieces import cheapest_runs, shared_costs
from vlmrm.batching.tree import Segment, Tree, common_prefix, grow, grow_after, sort_key, tokens_after
from vlmrm.rendering import ProcessedMedia, Rendered

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kept:
    """Hold what the layers, in order, have computed of the first `tokens` of a conversation.

    Attention keeps keys and values [1, H, tokens, D], a recurrence its state, a convolution its last inputs.
    """

    tokens: int
    layers: list[Tensors] = field(default_factory=list)

    def tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield from layer


@dataclass(frozen=True)
class Keep:
    """Name a prefix that the layers keep: its last segment, its `ranges` in the row, and where they keep it."""

    segment: int
    ranges: Sequence[tuple[int, int]]
    kept: Kept


@dataclass(frozen=True)
class PackedSegment:
    """Mark tokens `start` to `stop` of a packed row; they continue segment `parent` (-1: none).

    `depth` is the number of segments before it on its path; `conversations` of the batch have its tokens. A `held`
    segment is a cached prefix: its tokens are not in the row, and its positions are negative.
    """

    start: int
    stop: int
    parent: int
    depth: int
    conversations: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def held(self) -> bool:
        return self.start < 0


@dataclass(frozen=True)
class Span:
    """Pair queries `start` to `stop` with the ranges of keys that the last of them attends to.

    The queries are of one segment, or of several on one path; the last range of keys ends with their own.
    """

    start: int
    stop: int
    keys: Sequence[tuple[int, int]]

    @property
    def before(self) -> int:
        """The number of keys on the path before the span's own."""
        return sum(stop - start for start, stop in self.keys) - (self.stop - self.start)


@dataclass(eq=False)
class PackedLayout:
    """Describe a packed row: its attention pattern, and where its conversations end.

    Each segment attends to itself, causally, and to the segments before it on its path. `segments` cover the row in
    order, parents first; `spans` join neighbouring segments for attention. The layout travels beside a batch's tensors
    to the layers of the language model; what they derive from it is computed once for all of them.

    The keys of the `held` segments (cached prefixes), in order, come before the row's own. The layers store `keep`,
    the prefixes for later rows, unless one of them has `refused`.
    """

    segments: Sequence[PackedSegment]
    spans: Sequence[Span]
    last_tokens: Sequence[int]
    held: Sequence[Kept] = ()
    keep: Mapping[str, Keep] = field(default_factory=dict)
    refused: str | None = None
    _calls: int = field(default=0, init=False)
    _ends: torch.Tensor | None = field(default=None, init=False)
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False)
    _gathered: Gathered | None = field(default=None, init=False)

    @classmethod
    def of(cls, tree: Tree) -> PackedLayout:
        """Return the layout of a row with the tree's segments one after another, in as few spans as possible."""
        held = [segment.held for segment in tree.segments]
        lengths = [len(segment) for segment in tree.segments]
        # Held segments fill the positions below zero, up to the row's first token at 0.
        offset = {True: -sum(n for n, is_held in zip(lengths, held, strict=True) if is_held), False: 0}
        starts, stops = [], []
        for is_held, length in zip(held, lengths, strict=True):
            starts.append(offset[is_held])
            offset[is_held] += length
            stops.append(offset[is_held])
        conversations = [0] * len(tree.segments)
        for end in tree.ends:
            for index in tree.path(end):
                conversations[index] += 1
        segments = [
            PackedSegment(starts[i], stops[i], segment.parent, len(tree.path(i)) - 1, conversations[i])
            for i, segment in enumerate(tree.segments)
        ]
        spans: list[Span] = []
        for index in (i for i, is_held in enumerate(held) if not is_held):
            keys: list[tuple[int, int]] = []
            for i in tree.path(index):
                if keys and keys[-1][1] == starts[i]:
                    keys[-1] = (keys[-1][0], stops[i])  # neighbours in the row need no copy
                else:
                    keys.append((starts[i], stops[i]))
            start = starts[index]
            if spans and keys == [*spans[-1].keys[:-1], (spans[-1].keys[-1][0], stops[index])]:
                start = spans.pop().start  # continues the span before it, as a first answer does its prompt
            spans.append(Span(start, stops[index], keys))
        return cls(segments, spans, sorted({stops[index] - 1 for index in tree.ends}))

    def __len__(self) -> int:
        """Return the number of tokens in the row."""
        return self.spans[-1].stop

    @property
    def before(self) -> int:
        """Tokens of the held segments; their keys come before those of the row."""
        return sum(len(segment) for segment in self.segments if segment.held)

    def take(self) -> list[Tensors]:
        """Return what the next layer kept of the held segments. Layers take in turn, and then put."""
        call, self._calls = self._calls, self._calls + 1
        return [kept.layers[call] for kept in self.held]

    def put(self, made: Callable[[Keep], Tensors]) -> None:
        """Keep what a layer has `made` of each prefix to keep."""
        for keep in self.keep.values():
            keep.kept.layers.append(made(keep))

    def refuse(self, reason: str) -> None:
        """Keep nothing of this row's prefixes, as later rows could not continue them."""
        self.refused, self.keep = reason, {}

    @property
    def longest(self) -> int:
        """Tokens of the longest path: the most that any query attends to."""
        return max(self._lengths()[1])

    def ends(self, device: torch.device) -> torch.Tensor:
        """Return the positions of the conversations' last tokens, and of others that are read, each once, in order."""
        if self._ends is None or self._ends.device != device:
            self._ends = on_device(torch.tensor(self.last_tokens), device)
        return self._ends

    def positions(self, *, held: bool = False) -> np.ndarray:
        """Return the number of tokens before each one in its own conversation, int64 [T].

        With `held`, those of held segments come last: their negative positions index them from the end.
        """
        firsts: list[int] = []
        for segment in self.segments:
            before = self.segments[segment.parent] if segment.parent >= 0 else None
            firsts.append(0 if before is None else firsts[segment.parent] + len(before))
        positions = [(s.held, first + np.arange(len(s))) for first, s in zip(firsts, self.segments, strict=True)]
        in_row = [values for is_held, values in positions if not is_held]
        return np.concatenate([*in_row, *(values for is_held, values in positions if is_held and held)])

    def conversations(self) -> np.ndarray:
        """Return the number of conversations of the batch that hold each token, int64 [T]."""
        in_row = [segment for segment in self.segments if not segment.held]
        return np.repeat([s.conversations for s in in_row], [len(s) for s in in_row])

    def mask(self, span: Span, device: torch.device) -> torch.Tensor:
        """Return the bottom-right causal mask of a span, boolean [queries, keys], True where a query attends."""
        shape = (span.stop - span.start, span.before)
        if shape not in self._masks:
            queries, before = shape
            self._masks[shape] = torch.ones(queries, before + queries, dtype=torch.bool, device=device).tril(before)
        return self._masks[shape]

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Return the number of queries and of keys of each span."""
        queries = [span.stop - span.start for span in self.spans]
        return queries, [length + span.before for length, span in zip(queries, self.spans, strict=True)]

    def gathered(self, device: torch.device) -> Gathered:
        """Return the spans in the form that variable-length kernels take."""
        if self._gathered is None or self._gathered.keys.device != device:
            queries, keys = self._lengths()
            index = torch.cat([torch.arange(a, b) for span in self.spans for a, b in span.keys]) + self.before
            self._gathered = Gathered(
                on_device(index, device),
                _cumulative(queries, device),
                _cumulative(keys, device),
                max(queries),
                max(keys),
            )
        return self._gathered


@dataclass(frozen=True)
class Gathered:
    """Indices for a variable-length kernel.

    `keys` [K] are the places of every span's keys among those held and the row's, span after span; `cu_*` [spans + 1],
    int32, are the cumulative lengths.
    """

    keys: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int


def _cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return on_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on `device`; from the host to CUDA without waiting for the work that is queued there.

    Do not write to the tensor afterwards: pinned memory is read when the copy's turn has come.
    """
    # Alone in this direction: what is copied to the host could be read before it is there.
    return tensor.to(device, non_blocking=tensor.is_cpu and torch.device(device).type == "cuda")


@dataclass(frozen=True)
class RotaryPositions:
    """Computes a family's own positions without a model: its method needs the configuration and nothing else."""

    backbone: Any  # the class, not an instance: this travels to DataLoader workers, which must not copy weights
    config: Any

    def __getattr__(self, name: str) -> Any:
        """Return what `get_rope_index` needs of its instance: the class's own methods and constants."""
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(self.backbone, name):  # what an instance has from its configuration, as Qwen's omni models do
            return getattr(self.config.vision_config, name)
        member = inspect.getattr_static(self.backbone, name)
        return member.__get__(self, type(self)) if hasattr(member, "__get__") else member

    def __call__(self, rendered: Rendered) -> torch.Tensor:
        """Return the temporal, height and width position of each token, [3, T]."""
        ids = torch.tensor([rendered.input_ids])
        inputs = {
            **join(rendered.media),
            "mm_token_type_ids": torch.tensor([rendered.type_ids]),
            "attention_mask": torch.ones_like(ids),
        }
        if "video_second_per_grid" in inputs:  # by this name in the omni models' forward
            inputs["second_per_grids"] = inputs["video_second_per_grid"]
        parameters = inspect.signature(inspect.unwrap(self.backbone.get_rope_index)).parameters
        known = {name: value for name, value in inputs.items() if name in parameters}
        positions, _ = self.backbone.get_rope_index(self, input_ids=ids, **known)
        return positions[:, 0]


def path_positions(rendered: Rendered) -> torch.Tensor:
    """Return the index of each token, [1, T]."""
    return torch.arange(len(rendered))[None]


@dataclass(frozen=True)
class SharedBatcher:
    """Packs conversations into one row with its layout.

    The inputs are `input_ids` [1, T], `attention_mask` of ones, `position_ids` [1, T] or [3, 1, T], the type ids under
    the model's names, `branch_ends` [N] (the position of each conversation's last token), `layout` and `media`.
    """

    positions: Callable[[Rendered], torch.Tensor]
    type_names: Sequence[str]
    placeholders: Collection[int]  # the tokens that features replace
    # The tokens of an image see those of other images in the conversation, also of later ones.
    images_see_all: bool

    @classmethod
    def of(cls, model: Any) -> SharedBatcher:
        """Return the batcher for a reward model."""
        backbone = type(model.model)
        rotary = hasattr(backbone, "get_rope_index") and not model.has_text_positions
        positions = RotaryPositions(backbone, model.config) if rotary else path_positions
        return cls(positions, model.type_names, model.placeholders, model.family.images_see_all)

    def __call__(self, rendered: Sequence[Rendered]) -> dict[str, Any]:
        numbers: Numbers = {}
        return self._batch(rendered, grow([self.identities(item, numbers) for item in rendered]))

    def after_prefixes(
        self, rendered: Sequence[Rendered], kept: Callable[[str], Kept | None], *, keep: bool
    ) -> dict[str, Any]:
        """Return the inputs without the prompts that are cached: `kept` finds them by their digests.

        With `keep`, the layers store the other prompts. Images carry their keys: their features are cached by them.
        """
        numbers: Numbers = {}
        identities = [self.identities(item, numbers) for item in rendered]
        digests = [self.prefix(item) for item in rendered]
        cached = {digest: kept(digest) for digest in dict.fromkeys(digests) if digest is not None}
        cuts = [0 if digest is None else item.prompt for item, digest in zip(rendered, digests, strict=True)]
        held = [digest if digest is not None and cached[digest] else None for digest in digests]
        tree = grow_after(identities, cuts, held)
        inputs = self._batch(rendered, tree, keyed=True)
        layout: PackedLayout = inputs["layout"]
        layout.held = [kept for name in dict.fromkeys(held) if name is not None and (kept := cached[name])]
        if keep:
            computed = {digest: i for i, digest in enumerate(digests) if digest is not None and held[i] is None}
            layout.keep = {digest: _keep(layout, tree, i, cuts[i]) for digest, i in computed.items()}
        return inputs

    def prefix(self, rendered: Rendered) -> str | None:
        """Return the digest of a conversation's prompt: of its tokens, and of the content of its media by their keys.

        Their positions follow from these. None where the prompt is not known, or ends inside an image.
        """
        numbers: Numbers = {}
        ids = self.identities(rendered, numbers)
        end = rendered.prompt
        if not end or (ids[end - 1] < 0 and ids[end] < 0):
            return None
        return named(ids[:end], [*numbers])

    def _batch(self, rendered: Sequence[Rendered], tree: Tree, *, keyed: bool = False) -> dict[str, Any]:
        computed = [segment for segment in tree.segments if not segment.held]
        positions = {i: self.positions(rendered[i]) for i in {segment.sequence for segment in computed}}
        parts = [(rendered[s.sequence], slice(s.begin, s.end)) for s in computed]
        ids = torch.tensor([[token for item, part in parts for token in item.input_ids[part]]])
        types = torch.tensor([[kind for item, part in parts for kind in item.type_ids[part]]])
        row = torch.cat([positions[s.sequence][:, s.begin : s.end] for s in computed], 1)
        lasts = np.cumsum([0 if segment.held else len(segment) for segment in tree.segments]) - 1
        starts = lasts + 1 - [len(segment) for segment in tree.segments]
        layout = PackedLayout.of(tree)

        def places(i: int) -> np.ndarray:
            return np.concatenate([np.arange(starts[s], lasts[s] + 1) for s in tree.path(tree.ends[i])])

        if taught := taught_tokens(rendered, places):
            layout.last_tokens = sorted({*layout.last_tokens, *taught["taught_places"].tolist()})
        return {
            "input_ids": ids,
            # Without a mask, transformers would take each restart of the positions for another document.
            "attention_mask": torch.ones_like(ids),
            "position_ids": row[:, None] if len(row) > 1 else row,
            **dict.fromkeys(self.type_names, types),
            "branch_ends": torch.from_numpy(lasts[tree.ends]),
            "layout": layout,
            **taught,
            "media": self._media(rendered, computed, keyed),
        }

    def split(self, units: Sequence[Unit], budget: int) -> list[list[int]]:
        """Return parts under the budget, shared tokens and images counted once; units that share most go together."""
        numbers: Numbers = {}
        identities = [sorted((self.identities(item, numbers) for item in unit), key=sort_key) for unit in units]
        parts: list[list[int]] = []
        used = 0
        previous: np.ndarray | None = None  # sorted, each conversation shares most with the one before it
        keys: set[str] = set()  # of the media of the current part
        for index in sorted(range(len(units)), key=lambda i: sort_key(identities[i][0])):
            media = {medium.key: medium.patches for item in units[index] for medium in item.media}
            tokens = tokens_after(previous, identities[index])
            patches = sum(count for key, count in media.items() if key not in keys)
            if not parts or used + tokens + patches > budget:
                parts.append([])
                used, keys = 0, set()
                tokens, patches = tokens_after(None, identities[index]), sum(media.values())
            parts[-1].append(index)
            used, previous, keys = used + tokens + patches, identities[index][-1], keys | media.keys()
        return parts

    def cut(self, unit: Unit, budget: int) -> list[list[int]]:
        """Return pieces under the budget; shared tokens and images count once in each piece."""
        numbers: Numbers = {}
        identities = [self.identities(item, numbers) for item in unit]
        order = sorted(range(len(unit)), key=lambda i: sort_key(identities[i]))
        costs = shared_costs(
            [len(identities[i]) for i in order],
            [0, *(common_prefix(identities[a], identities[b]) for a, b in pairwise(order))],
            [{medium.key: medium.patches for medium in unit[i].media} for i in order],
        )
        pieces = cheapest_runs(len(order), costs, budget, lambda run: self.size([unit[order[n]] for n in run]))
        return [[order[n] for n in run] for run in pieces]

    def size(self, rendered: Sequence[Rendered]) -> int:
        numbers: Numbers = {}
        tokens = len(grow([self.identities(item, numbers) for item in rendered]))
        return tokens + sum({medium.key: medium.patches for item in rendered for medium in item.media}.values())

    def identities(self, rendered: Rendered, numbers: Numbers) -> np.ndarray:
        """Return the conversation as integers [T]: token ids, with those of media replaced by a number for them.

        A run of adjacent placeholders is one number, so that a tree never divides it: its tokens may see each other.
        `numbers` has the number of the media of each run, in order of appearance, and is extended here. Numbers, not
        hashes of paths: the order of a row's segments, and so the last bits of its scores, must not depend on where
        files are.
        """
        ids = np.array(rendered.input_ids, dtype=np.int64)
        types = np.array(rendered.type_ids)
        media = np.full(len(ids), None)
        for medium, positions in self._placed(rendered):
            media[positions] = medium.key
        in_runs = runs((types > 0) | (media != None))  # noqa: E711 (of each element)
        # An image that sees the last one also sees, through it, every word before that.
        ahead = [*(medium.key for medium in rendered.media), str(ids[: in_runs[-1][1]].tolist())] if in_runs else []
        for start, stop in in_runs:
            # With their lengths: of two adjacent images either may stand twice.
            keys = (
                ahead if self.images_see_all else [f"{len([*run])} {key}" for key, run in groupby(media[start:stop])]
            )
            ids[start:stop] = -1 - numbers.setdefault(tuple(keys), len(numbers))  # negative: no token has such an id
        return ids

    def _media(self, rendered: Sequence[Rendered], segments: Sequence[Segment], keyed: bool) -> Media:
        media: Media = {}
        in_row = []
        start = 0
        for segment in segments:
            in_row += [(medium, places + start) for medium, places in self._media_in(rendered, segment)]
            start += len(segment)
        for kind in dict.fromkeys(medium.encoded_as for medium, _ in in_row):
            of_kind = [(medium, places) for medium, places in in_row if medium.encoded_as == kind]
            media[kind] = distinct_media([medium for medium, _ in of_kind], self.placeholders)
            if keyed:
                media[kind]["keys"] = list(dict.fromkeys(medium.key for medium, _ in of_kind))
            media[kind]["places"] = torch.from_numpy(np.concatenate([places for _, places in of_kind]))
        return media

    def _placed(self, rendered: Rendered) -> list[tuple[ProcessedMedia, np.ndarray]]:
        """Return the media of a conversation, each with the positions of its placeholders."""
        counts = [placeholders_in(medium, self.placeholders) for medium in rendered.media]
        if 0 in counts:
            medium = rendered.media[counts.index(0)]
            raise ValueError(
                f"the {medium.kind} {medium.key} stands as {medium.replacement!r:.99}: no token of features"
            )
        positions = np.flatnonzero(np.isin(rendered.input_ids, list(self.placeholders)))
        return list(zip(rendered.media, np.split(positions, np.cumsum(counts)[:-1]), strict=True)) if counts else []

    def _media_in(self, rendered: Sequence[Rendered], segment: Segment) -> list[tuple[ProcessedMedia, np.ndarray]]:
        """Return the media of a segment, and where in it. No segment ends inside an image."""
        placed = self._placed(rendered[segment.sequence])
        return [
            (medium, places - segment.begin) for medium, places in placed if segment.begin <= places[0] < segment.end
        ]


def _keep(layout: PackedLayout, tree: Tree, index: int, end: int) -> Keep:
    """Return the prefix to keep: the first `end` tokens of conversation `index`, and a segment ends there."""
    path: list[int] = []
    for i in tree.path(tree.ends[index]):
        if tree.segments[i].end <= end:
            path.append(i)
    ranges = [(layout.segments[i].start, layout.segments[i].stop) for i in path]
    return Keep(path[-1], ranges, Kept(end))


# By the keys of the media whose placeholders stand side by side.
Numbers = dict[tuple[str, ...], int]


def runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return the start and stop of each run of True in `flags` [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def named(identities: np.ndarray, media: Sequence[Sequence[str]]) -> str:
    """Return a digest of token identities: -1 - i stands for the `media[i]`."""
    present = media[: 1 + max(-1 - int(identities.min()), -1)]
    return blake2b(identities.astype("<i8").tobytes() + repr(list(map(list, present))).encode()).hexdigest()

"""Data sets of comparisons: sources mixed, sampled and split, with rows that are read on access.

A data set is an index, the source and number of each row: selecting, shuffling and splitting move integers, and a row
becomes a `Comparison` only when it is accessed.
"""

from __future__ import annotations

import glob
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vlmrm.conversation import Comparison, Messages, media_of, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import MALFORMED, SPECIAL
from vlmrm.data.media import PathRules, media_key
from vlmrm.data.rows import ReadRow, read_or_error, read_row
from vlmrm.data.tables import InMemory, Source, first_rows, load_sources, read_cells
from vlmrm.errors import ConfigError, DataError, RowError, UnreadColumnError
from vlmrm.files import content_digests, visible_files
from vlmrm.formats import LAYOUTS, LAYOUTS_TO_SCORE, detect_layout
from vlmrm.formats.layout import Layout
from vlmrm.logs import progress

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("vlmrm")

CHUNK = 1000  # rows read at a time in a pass over all
SourceGroup = list[tuple[Source, PathRules]]  # the sources that one path names


@dataclass(frozen=True)
class RowReader:
    """The transform of an index: (source, row) numbers → comparisons. DataLoader workers receive it by pickle."""

    sources: Sequence[Source]
    rules: Sequence[PathRules]
    read: ReadRow = read_row

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        comparisons: list[Comparison | RowError | None] = [None] * len(batch["row"])
        positions: dict[int, list[int]] = {}  # in the batch, by source
        for position, number in enumerate(batch["source"]):
            positions.setdefault(number, []).append(position)
        for number, in_source in positions.items():
            source, rule = self.sources[number], self.rules[number]
            rows = [batch["row"][position] for position in in_source]
            for position, row, cells in zip(in_source, rows, read_cells(source, rows), strict=True):
                comparisons[position] = read_or_error(cells, f"{source.name}:{row + 1}", rule, self.read)
        return {"index": batch["index"], "comparison": comparisons}


def load_comparisons(
    paths: Sequence[str],
    *,
    arguments: DataArguments,
    split: str = "train",
    weights: Sequence[float] | None = None,
    limit: int | None = None,
) -> Dataset:
    """Open `paths` as one data set of rows `{"index": int, "comparison": Comparison | RowError}`.

    `index` numbers the rows of all sources before sampling, so a repeated row keeps its number. A weight of 2 repeats
    the rows of a path, 0.5 takes a random half of them; `limit` takes a random subset; both are seeded by
    `split_seed` and keep the sources' order.

        rows = load_comparisons(["pairs.jsonl"], arguments=DataArguments(image_root="images"))
        rows[0]["comparison"].pairs()
    """
    layouts = LAYOUTS_TO_SCORE if arguments.named_outputs.named else LAYOUTS
    keys = {"images": arguments.images, "critiques": bool(arguments.critique_weight)}
    read = partial(read_row, outputs=arguments.named_outputs, **keys)
    groups = open_groups(paths, split, arguments, read, layouts)
    return sample(index_rows(groups, read), weights, limit, arguments.split_seed)


def open_groups(
    paths: Sequence[str],
    split: str,
    arguments: DataArguments,
    read: ReadRow = read_row,
    layouts: Sequence[Layout] = LAYOUTS,
) -> list[SourceGroup]:
    """Return the sources of each path, with the rules for their media paths.

    The tables of a path must not all be empty, and their first rows have no media or prompt that is not read. Other
    columns that are not read are logged.
    """
    opened = load_sources(paths, split, arguments.bad_rows, arguments.column_names, layouts)
    groups = [with_path_rules(sources, arguments) for sources in opened]
    named = arguments.named_outputs.named | arguments.critiques
    for group in groups:
        checked: set[frozenset[str]] = set()
        for source, rule in group:
            columns = frozenset(source.columns)
            if columns in checked:  # one of a thousand files of the same columns is enough
                continue
            if rows := first_rows(source):
                checked.add(columns)
            unread: set[str] = set()
            for number, cells in enumerate(rows, 1):
                comparison = read_or_error(cells, f"{source.name}:{number}", rule, read)
                if isinstance(comparison, UnreadColumnError):
                    raise DataError(f"{source.name}: {comparison.reason}")
                if isinstance(comparison, Comparison) and isinstance(cells, dict):
                    present = {name for name, value in cells.items() if value is not None} - {MALFORMED}
                    unread |= present - named - detect_layout(present, layouts).columns() - SPECIAL
            if unread:
                logger.warning("%s: not read: %s", source.name, ", ".join(f"`{name}`" for name in sorted(unread)))
        if not checked:
            raise DataError(f"there are no rows in {', '.join(source.name for source, _ in group)}")
    return groups


def with_path_rules(sources: Sequence[Source], arguments: DataArguments) -> SourceGroup:
    """Return each source with the rules for its media paths."""
    rewrites = tuple((old, new) for old, _, new in (rule.partition("=") for rule in arguments.path_rewrites))
    root = arguments.image_root
    return [(source, PathRules(root or source.folder, root, rewrites)) for source in sources]


def index_rows(groups: Sequence[SourceGroup], read: ReadRow = read_row) -> Dataset:
    """Return a data set over the rows of all sources, which `read` reads on access."""
    from datasets import Dataset

    sources, rules = zip(*(pair for group in groups for pair in group), strict=True)
    lengths = [len(source.table) for source in sources]
    total = sum(lengths)
    if not total:
        raise DataError(f"there are no rows in {', '.join(source.name for source in sources)}")
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    index = Dataset.from_dict(
        {
            "index": np.arange(total),
            "group": np.repeat(group_of, lengths),
            "source": np.repeat(np.arange(len(sources)), lengths),
            "row": np.concatenate([np.arange(length) for length in lengths]),
        }
    )
    return index.with_transform(RowReader(sources, rules, read))


def sample(dataset: Dataset, weights: Sequence[float] | None, limit: int | None, seed: int) -> Dataset:
    """Return a seeded sample of the rows, in order: `weights`, one per path, then at most `limit` rows."""
    rng = np.random.default_rng(seed)
    rows = np.arange(len(dataset))
    if weights is not None:
        groups, parts = index_column(dataset, "group"), []
        for number, weight in enumerate(weights):
            if not 0 <= weight < float("inf"):
                raise ConfigError(f"dataset_weights holds {weight}: a weight is a number of repetitions, 0 or more")
            of_group, (repeats, fraction) = rows[groups == number], divmod(weight, 1)
            sampled = rng.choice(of_group, round(fraction * len(of_group)), replace=False)
            parts += [np.repeat(of_group, int(repeats)), sampled]
        rows = np.sort(np.concatenate(parts))
    if limit is not None and limit < len(rows):
        rows = rows[np.sort(rng.choice(len(rows), limit, replace=False))]
    if not len(rows):
        raise DataError("no rows are left after dataset_weights: raise them")
    return dataset if np.array_equal(rows, np.arange(len(dataset))) else dataset.select(rows)


def index_column(dataset: Dataset, column: str) -> np.ndarray:
    """Return a column of the index, int64 [rows]."""
    return np.asarray(dataset.with_format("numpy")[column][:])


def reader_of(dataset: Dataset) -> RowReader:
    """Return the reader of a data set of comparisons, which knows its sources."""
    return dataset.format["format_kwargs"]["transform"]


def iterate_comparisons(dataset: Dataset) -> Iterator[Comparison | RowError]:
    """Yield every row of a data set of comparisons, or its error, reading `CHUNK` rows at a time."""
    chunks = (dataset[start : start + CHUNK]["comparison"] for start in range(0, len(dataset), CHUNK))
    yield from progress(chain.from_iterable(chunks), "reading rows", len(dataset))


def iterate_readable(dataset: Dataset) -> Iterator[Comparison]:
    """Yield the rows of a data set of comparisons that can be read."""
    return (row for row in iterate_comparisons(dataset) if isinstance(row, Comparison))


def split_held_out(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split into (train, eval) by prompt: rows with the same prompt, images included, are on the same side.

    The side depends only on the prompt and the seed, not on the set of rows or the folder of the files. Rows that
    cannot be read stay in train.
    """
    keys = prompt_keys(dataset)
    errors = [key for key in keys if isinstance(key, RowError)]
    held = [isinstance(key, str) and is_held_out_key(key, fraction, seed) for key in keys]
    train, held_out = np.flatnonzero(np.logical_not(held)), np.flatnonzero(held)
    if not len(train) or not len(held_out):
        why = "there are too few different prompts among them; change it or give eval_dataset_path"
        if errors:
            why = f"{len(errors)} cannot be read, the first because {errors[0].reason}; vlmrm check-data names them"
        side = "evaluation" if len(train) else "training"
        raise DataError(f"eval_fraction {fraction} leaves no rows for {side} of {len(dataset)}: {why}")
    return dataset.select(train), dataset.select(held_out)


def prompt_keys(dataset: Dataset) -> list[str | RowError]:
    """Return what tells the prompt of each row from others, its images included; of a row without one its error."""
    folders = [rule.folder for rule in reader_of(dataset).rules]
    return [
        row if isinstance(row, RowError) else "\0".join(split_key(row, folders[source]))
        for row, source in zip(iterate_comparisons(dataset), index_column(dataset, "source"), strict=True)
    ]


def is_held_out_key(key: str, fraction: float, seed: int) -> bool:
    """Return the side of a prompt by its key, for a share `fraction` of all prompts."""
    digest = blake2b(key.encode(), digest_size=8, key=str(seed).encode())
    return int.from_bytes(digest.digest(), "big") < fraction * 2**64


def split_key(comparison: Comparison, folder: str) -> list[str]:
    """Return texts and media of the prompt; without a shared prompt, of all messages before the last ones."""
    if comparison.prompt:
        texts = [text_of(comparison.prompt)]
        media = media_of(comparison.prompt)
    else:
        texts = sorted(text_of(answer[:-1] or answer) for answer in comparison.answers)
        media = [medium for answer in comparison.answers for medium in media_of(answer)]
    keys = (media_key(medium.reference).removeprefix(folder) for medium in media)
    return [*texts, *(keys if comparison.prompt else sorted(keys))]


def load_train_and_eval(arguments: DataArguments) -> tuple[Dataset, Dataset | None]:
    """Return the training and evaluation data of a configuration; None for evaluation data that it does not name."""
    if not arguments.dataset_path:
        raise ConfigError("dataset_path is missing: name the preference data to train on")
    if arguments.eval_dataset_path and arguments.eval_fraction:
        raise ConfigError("eval_fraction and eval_dataset_path both say what to evaluate on: remove one of them")
    load: Any = partial(load_comparisons, arguments=arguments)
    whole = partial(load, arguments.dataset_path, split=arguments.dataset_split)
    weights, limit, seed = arguments.dataset_weights, arguments.max_train_samples, arguments.split_seed
    if arguments.eval_fraction:
        # Split before weighting: a row that is trained on twice must not be evaluated twice.
        train, held_out = split_held_out(whole(), arguments.eval_fraction, seed)
        return sample(train, weights, limit, seed), sample(held_out, None, arguments.max_eval_samples, seed)
    rows = whole(weights=weights, limit=limit)
    paths, split = arguments.eval_dataset_path, arguments.eval_dataset_split
    return rows, load(paths, split=split, limit=arguments.max_eval_samples) if paths else None


def data_fingerprint(paths: Sequence[str]) -> str:
    """Return a hex digest over the names and contents of the files behind `paths`, and over hub ids.

    Results and checkpoints record it. Images that a table names by path count only if `paths` has their folder;
    hidden files below a folder (caches, locks) never do.
    """
    digest = blake2b(digest_size=16)
    for path in paths:
        if isinstance(path, InMemory):
            digest.update(getattr(path.table, "_fingerprint", path).encode())
            continue
        try:
            contents = content_digests(_files(path))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{error.filename or path} cannot be read ({reason}): check its permissions.") from error
        for file, content in contents.items():
            digest.update(f"{file.name}\0{content}\0".encode())
        digest.update(b"" if Path(path).exists() else path.encode())
    return digest.hexdigest()


def _files(path: str) -> list[Path]:
    """Return the files of `path`: the file itself, those below a folder, or those that match a pattern."""
    if Path(path).is_dir():
        return visible_files(Path(path))
    files = [path] if Path(path).is_file() else glob.glob(path, recursive=True)
    return sorted(file for file in map(Path, files) if file.is_file())


# Irrelevant queries: the answers of a comparison under another comparison's prompt, where neither should win.
#
# A reward model that prefers the chosen answer under any question and image has learned the answers, not the task.
# Donor prompts come from the same batch if possible, whose prefixes are computed anyway, else from the data set.

DRAWS = 20  # attempts for each donor from the data set, which may have a single prompt


@dataclass
class IrrelevantQueries:
    """Chooses donor prompts from a data set, by the seed, the epoch and the row's id, alike in any process."""

    count: int
    seed: int
    dataset: Any  # of rows that hold a `comparison`

    def draw(self, rng: random.Random) -> Comparison | None:
        """Return a comparison of the data set; None where the drawn row cannot be read."""
        comparison = self.dataset[rng.randrange(len(self.dataset))]["comparison"]
        return comparison if isinstance(comparison, Comparison) else None

    def donors(self, comparison: Comparison, batch: Sequence[Comparison], epoch: int) -> list[Comparison]:
        """Return up to `count` comparisons whose prompts are irrelevant to this one's answers and to each other."""
        if not comparison.prompt or not self.count:
            return []
        rng = random.Random(f"{self.seed}:{epoch}:{comparison.id}")
        candidates = [donor for donor in batch if donor is not comparison]
        rng.shuffle(candidates)
        donors: list[Comparison] = []
        for donor in chain(candidates, (self.draw(rng) for _ in range(DRAWS * self.count))):
            if donor is None or not donor.prompt:
                continue
            if all(are_unrelated(subject(donor.prompt), subject(taken.prompt)) for taken in (comparison, *donors)):
                donors.append(donor)
                if len(donors) == self.count:  # before another row is read
                    break
        return donors


Subject: TypeAlias = frozenset[str] | str


def subject(prompt: Messages) -> Subject:
    """Return what an irrelevant prompt must not share: the keys of the media or, without any, the text."""
    return frozenset(media_key(medium.reference) for medium in media_of(prompt)) or text_of(prompt)


def are_unrelated(a: Subject, b: Subject) -> bool:
    """Return whether prompts of these subjects are irrelevant to each other."""
    if isinstance(a, str) or isinstance(b, str):
        # A model would tell a question about an image from a request for one too easily.
        return isinstance(a, str) and isinstance(b, str) and a != b
    return a.isdisjoint(b)


def best_and_worst(comparison: Comparison) -> tuple[int, int]:
    """Return the indices of the answers of the highest and the lowest rating, which a donor prompt is given.

    Of equal ones the first is the best and the last the worst, so that a tie has both its answers.
    """
    ratings = comparison.ratings
    order = range(len(ratings))
    return max(order, key=ratings.__getitem__), min(reversed(order), key=ratings.__getitem__)

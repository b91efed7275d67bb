"""How much a score in bfloat16 depends on the company that it is computed in, and how far it lies from float32.

With random weights scores lie closer together than trained ones do, so both are given as a share of their own spread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import real_configuration
from benchmarks.gpu.running import Run
from benchmarks.harness import Row, row
from benchmarks.naive import NaiveRewardModel, padded
from benchmarks.shapes import Pair, Workload, reward_model, training
from vlmrm.batching import to_device
from vlmrm.modeling.compiled import compile_blocks

PAIRS = 16
COMPANIES = (1, 2, 8, 32)  # conversations of a batch
ORDERS = 2  # of the conversations, for each size of batch


def noise(run: Run) -> None:
    """Score 32 conversations of a 3B in several batches and orders: shared, padded, compiled, and in float32."""
    scores = Scores(run)
    run.attempt("shared", partial(scores.rows, "shared"))
    run.attempt("padded", partial(scores.rows, "padded"))
    run.attempt("compiled", partial(scores.rows, "compiled"))


class Scores:
    """The scores of one model over one set of conversations, in each company."""

    def __init__(self, run: Run):
        self.run, self.pairs = run, 4 if run.tiny else PAIRS
        self._model: Any = None
        self._exact: np.ndarray | None = None

    def prepare(self) -> Workload:
        """Return the conversations; on first use also make the model, and the scores of its copy in float32."""
        config = real_configuration("3b", self.run.tiny)
        pair = Pair(4, 6, 5, 3) if self.run.tiny else Pair(256, 64, 128, 96)
        work = training(config, [pair] * self.pairs, irrelevant=False)
        if self._exact is None:
            self._model = reward_model(config, self.run.device, torch.bfloat16)
            for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
                backend.allow_tf32 = False  # of the copy, whose convolution would round to it
            exact = copy.deepcopy(self._model[0]).float()
            self._exact = self.of(exact, self._model[1], work.conversations)
        return work

    @torch.inference_mode()
    def of(self, model: Any, batcher: Any, conversations: Sequence[Any]) -> np.ndarray:
        """Return the scores [N] of conversations as one shared batch; without a batcher, as one padded batch."""
        model.eval()
        if batcher is None:
            return model(**to_device(padded(conversations), self.run.device)).float().cpu().numpy()
        inputs = to_device(batcher(conversations), self.run.device)
        return model(**inputs).logits.squeeze(-1).float().cpu().numpy()

    def rows(self, way: str) -> Iterator[Row]:
        """Yield the spread of a conversation's score over companies, and the distance from float32."""
        work = self.prepare()
        assert self._exact is not None
        model, batcher = self._model
        if way == "compiled":
            compile_blocks(model, "aot_eager" if self.run.tiny else "inductor")
        scorer = (NaiveRewardModel(model), None) if way == "padded" else (model, batcher)
        made = np.stack(
            [self.in_company(scorer, work.conversations, size, order) for size in COMPANIES for order in range(ORDERS)]
        )
        spread = float(self._exact.std())
        alone = made[0]
        margins = made[:, 0::2] - made[:, 1::2]
        exact_margins = self._exact[0::2] - self._exact[1::2]
        details = {
            "largest": float(np.ptp(made, axis=0).max()) / spread,
            "equal_to_alone": float((made == alone).mean()),
            "spread_of_scores": spread,
        }
        yield row(f"{way}: of company", float(made.std(axis=0).mean()) / spread, "of the scores' spread") | details
        away = made - self._exact
        flips = float((np.sign(margins) != np.sign(exact_margins)).mean())
        details = {"largest": float(np.abs(away).max()) / spread, "pairs_turned": flips}
        yield row(f"{way}: from float32", float(away.std()) / spread, "of the scores' spread") | details

    def in_company(self, scorer: tuple[Any, Any], conversations: Sequence[Any], size: int, order: int) -> np.ndarray:
        """Return the scores [N] in batches of `size` conversations, drawn in one of several orders."""
        numbers = np.arange(len(conversations))
        if order:
            numbers = np.random.default_rng([size, order]).permutation(numbers)
        scores = np.empty(len(conversations), dtype=np.float32)
        for batch in np.array_split(numbers, -(-len(numbers) // size)):
            scores[batch] = self.of(*scorer, [conversations[n] for n in batch])
        return scores

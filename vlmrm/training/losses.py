"""The losses over a batch's scores: Bradley-Terry with margins, ties, irrelevant queries, centring.

All losses are sums over pairs divided by totals over the whole step (every accumulated batch on every rank), so a step
is the mean over its pairs however they are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from vlmrm.errors import ConfigError

Pairs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PreferenceLoss:
    """The training objective over the scores of one batch.

    preference: the one of PAIR_LOSSES that `pair_loss` names.
    irrelevant: `irrelevant_weight` times the tie loss of the answers under another prompt.
    center: `center_coefficient` times (r_chosen + r_rejected)², which keeps rewards near zero
    (Eisenstein et al. 2023, https://huggingface.co/papers/2312.09244, Eq. 2).
    """

    tie_threshold: float = 0.0
    irrelevant_weight: float = 1.0
    center_coefficient: float | None = None
    pair_loss: str = "bradley_terry"

    def __call__(self, scores: torch.Tensor, pairs: Pairs, totals: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the terms of the loss over scores[B] by name; their sum is the loss.

        `totals` [2]: the summed `pair_weights` of preference pairs and of irrelevant pairs over the whole step.
        """
        scores = scores.float()
        chosen, rejected = scores[pairs["chosen"]], scores[pairs["rejected"]]
        difference = chosen - rejected
        # Sums of products, not of selected elements: a selection waits for the device to know its length.
        irrelevant = pairs["irrelevant"].float()
        preference, weight = 1 - irrelevant, pairs["weight"]
        # A step without pairs of a kind has a total of 0: its term is 0 / tiny, not NaN.
        per_preference, per_irrelevant = totals.float().clamp_min(torch.finfo(torch.float32).tiny)

        fit = PAIR_LOSSES[self.pair_loss](difference - pairs["margin"], pairs["tie"], self.tie_threshold)
        # Sums over no pairs are in the graph too: every rank must run its backward.
        parts = {"preference": (preference * weight * fit).sum() / per_preference}
        of_ties = (irrelevant * weight * bradley_terry_tie(difference)).sum() / per_irrelevant
        parts["irrelevant"] = self.irrelevant_weight * of_ties
        if self.center_coefficient is not None:
            center = (preference * weight * (chosen + rejected) ** 2).sum() / per_preference
            parts["center"] = self.center_coefficient * center
        return parts


def pair_weights(pairs: Pairs) -> torch.Tensor:
    """Return the summed weights of the preference pairs and of the irrelevant pairs of one batch, [2]."""
    irrelevant = pairs["irrelevant"]
    return torch.stack([(~irrelevant * pairs["weight"]).sum(), (irrelevant * pairs["weight"]).sum()])


def bradley_terry(difference: torch.Tensor, tie: torch.Tensor, tie_threshold: float) -> torch.Tensor:
    """Return the negative log-likelihood of each pair; Rao-Kupper's with `tie_threshold` > 0."""
    if tie_threshold > 0:
        win, tied = rao_kupper_win(difference, tie_threshold), rao_kupper_tie(difference, tie_threshold)
    else:
        win, tied = -logsigmoid(difference), bradley_terry_tie(difference)
    return torch.where(tie, tied, win)


def bradley_terry_tie(difference: torch.Tensor) -> torch.Tensor:
    """Return -½ (log σ(d) + log σ(-d)): a tie is half a win for either side. Its minimum, ln 2, is at d = 0."""
    return -0.5 * (logsigmoid(difference) + logsigmoid(-difference))


def rao_kupper_win(difference: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return -log σ(d - η): the chosen wins by more than the threshold η = log θ (Rao & Kupper 1967)."""
    return -logsigmoid(difference - threshold)


def rao_kupper_tie(difference: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return -log[(θ² - 1) σ(d - η) σ(-d - η)], the remaining probability: neither wins by more than η."""
    return -(
        math.log(math.expm1(2 * threshold)) + logsigmoid(difference - threshold) + logsigmoid(-difference - threshold)
    )


# From difference[N] = r_chosen - r_rejected - margin, tie[N] and the key `tie_threshold`, the loss of each pair, [N].
PairLoss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
PAIR_LOSSES: dict[str, PairLoss] = {"bradley_terry": bradley_terry}  # by the key `pair_loss`


def register(name: str, loss: PairLoss) -> None:
    """Add a loss of pairs, as a plugin does; a tie is no win of either side, and `tie_threshold` may be above 0."""
    if name in PAIR_LOSSES:
        raise ConfigError(f"there is already a loss {name}: give yours another name.")
    PAIR_LOSSES[name] = loss

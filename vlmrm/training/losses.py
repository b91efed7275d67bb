"""The losses over a batch's scores: Bradley-Terry with margins and ties, ratings, irrelevant queries, centring.

All losses are sums over what is judged divided by totals over the whole step (every accumulated batch on every rank),
so a step is a mean, for each output, however it is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from vlmrm.errors import ConfigError
from vlmrm.modeling.head import places, split_columns, variance
from vlmrm.outputs import ONE, Output, Outputs

Pairs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """The training objective over the scores of one batch: for each output, the mean of what judges it.

    Of a pair: the one of PAIR_LOSSES that `pair_loss` names, or of a Gaussian output `gaussian`.
    Of a rating, a correctness or a progress: `rated`.
    irrelevant: `irrelevant_weight` times the tie loss of the answers under another prompt, of the first output.
    center: `center_coefficient` times (r_chosen + r_rejected)², which keeps rewards near zero
    (Eisenstein et al. 2023, https://huggingface.co/papers/2312.09244, Eq. 2).
    """

    irrelevant_weight: float = 1.0
    center_coefficient: float | None = None
    pair_loss: str = "bradley_terry"
    outputs: Outputs = ONE

    @property
    def terms(self) -> list[str]:
        """The names of the terms, each with its weight in the loss."""
        of_outputs = ["preference"] if len(self.outputs) == 1 else self.outputs.names
        return [*of_outputs, "irrelevant", *(["center"] if self.center_coefficient is not None else [])]

    def __call__(self, logits: torch.Tensor, pairs: Pairs, totals: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the terms of the loss over logits[B, C] by name; their sum is the loss.

        `totals` [K + 1]: the summed `judged_weights` of each output, and of irrelevant pairs, over the whole step.
        """
        logits = logits.float()
        # Sums of products, not of selected elements: a selection waits for the device to know its length.
        irrelevant = pairs["irrelevant"].float()
        weight = pairs["weight"]
        # A step without pairs of a kind has a total of 0: its term is 0 / tiny, not NaN.
        *per_output, per_irrelevant = totals.float().clamp_min(torch.finfo(torch.float32).tiny)
        place = places(self.outputs, logits)
        chosen, rejected = place[pairs["chosen"], pairs["output"]], place[pairs["rejected"], pairs["output"]]
        difference = chosen - rejected
        parts, center, terms = {}, [], self.terms
        columns = split_columns(self.outputs, logits)
        for number, (output, of_output, per) in enumerate(zip(self.outputs, columns, per_output, strict=True)):
            share = (1 - irrelevant) * (pairs["output"] == number) * weight
            # Sums over no pairs are in the graph too: every rank must run its backward.
            fit = self._fit(output, of_output, difference - pairs["margin"], pairs)
            parts[terms[number]] = (share * fit).sum() / per
            if self.center_coefficient is not None:
                compared = share * pairs["target"].isnan()
                center.append((compared * (chosen + rejected) ** 2).sum() / per)
        of_ties = (irrelevant * weight * bradley_terry_tie(difference)).sum() / per_irrelevant
        parts["irrelevant"] = self.irrelevant_weight * of_ties
        if self.center_coefficient is not None:
            parts["center"] = self.center_coefficient * torch.stack(center).sum()
        return parts

    def _fit(self, output: Output, columns: torch.Tensor, difference: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """Return the loss of each row of `pairs` as if it judged this output, of `columns` [B, its own]: [N]."""
        if output.kind == "gaussian":
            spread = variance(columns)
            return gaussian(difference, spread[pairs["chosen"]] + spread[pairs["rejected"]], pairs["tie"])
        fit = PAIR_LOSSES[self.pair_loss](difference, pairs["tie"])
        if not output.rates:
            return fit
        target = pairs["target"]
        of_target = rated if output.bins == 1 else binned
        return torch.where(target.isnan(), fit, of_target(columns[pairs["chosen"]], target.nan_to_num()))


def judged_weights(pairs: Pairs, outputs: int = 1) -> torch.Tensor:
    """Return the summed weights of what judges each output, and of the irrelevant pairs of one batch, [K + 1]."""
    irrelevant, weight = pairs["irrelevant"], pairs["weight"]
    of_outputs = [(~irrelevant * (pairs["output"] == number) * weight).sum() for number in range(outputs)]
    return torch.stack([*of_outputs, (irrelevant * weight).sum()])


def rated(columns: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the logarithmic loss [N] of columns [N, S] for targets [N] in [0, 1].

    With S = 1 the target is a probability, or a share of a range. With more, column s is the logit that a whole number
    of S + 1 is above the s lowest (a cumulative link: McCullagh 1980, with slopes of its own for each).
    """
    steps = columns.shape[1]
    above = (target[:, None] * steps - torch.arange(steps, device=target.device)).clamp(0, 1)
    return binary_cross_entropy_with_logits(columns, above, reduction="none").sum(1)


def binned(columns: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy [N] of S bins [N, S], spaced evenly from 0 to 1, for the two next to targets [N]."""
    distance = target[:, None] * (columns.shape[1] - 1) - torch.arange(columns.shape[1], device=target.device)
    return -((1 - distance.abs()).clamp(min=0) * columns.log_softmax(1)).sum(1)


# Nodes and logarithms of the weights of Gauss-Hermite quadrature: E[f(d)] = Σ w f(√2 s x + m) / √π.
NODES, WEIGHTS = np.polynomial.hermite.hermgauss(16)


def gaussian(difference: torch.Tensor, variance: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """Return -log E[σ(d)] of each pair, d normal with mean `difference` and this variance, all [N].

    HPSv3 (Ma et al. 2025, https://huggingface.co/papers/2508.03789, Eq. 4) draws d; here the integral is computed.
    """
    nodes = torch.as_tensor(NODES, dtype=difference.dtype, device=difference.device)
    weights = torch.as_tensor(np.log(WEIGHTS / np.sqrt(np.pi)), dtype=difference.dtype, device=difference.device)
    spread = (2 * variance).sqrt()[:, None] * nodes
    win, loss = (torch.logsumexp(logsigmoid(d[:, None] + spread) + weights, 1) for d in (difference, -difference))
    return -torch.where(tie, 0.5 * (win + loss), win)


def bradley_terry(difference: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each pair."""
    return torch.where(tie, bradley_terry_tie(difference), -logsigmoid(difference))


def bradley_terry_tie(difference: torch.Tensor) -> torch.Tensor:
    """Return -½ (log σ(d) + log σ(-d)): a tie is half a win for either side. Its minimum, ln 2, is at d = 0."""
    return -0.5 * (logsigmoid(difference) + logsigmoid(-difference))


# From difference[N] = r_chosen - r_rejected - margin, and tie[N], the loss of each pair, [N].
PairLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PAIR_LOSSES: dict[str, PairLoss] = {"bradley_terry": bradley_terry}  # by the key `pair_loss`


def register(name: str, loss: PairLoss) -> None:
    """Add a loss of pairs, as a plugin does; a tie is no win of either side."""
    if name in PAIR_LOSSES:
        raise ConfigError(f"there is already a loss {name}: give yours another name.")
    PAIR_LOSSES[name] = loss

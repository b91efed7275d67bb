"""The head of a reward model: from the hidden state of a conversation's last token to its score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vlmrm.errors import CheckpointError
from vlmrm.outputs import Output, Outputs

HEADS = ("linear", "mlp")  # those that training makes; imported models bring others
LOGITS = 512  # tokens whose logits over the vocabulary are in memory at a time
ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, whatever the type of its input, its weights or autocast.

    bfloat16 has less than three significant digits: two good answers would tie by rounding. `heads` are the outputs of
    heads side by side, each of which sees its share of the inputs alone.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, heads: Sequence[int] = ()):
        super().__init__(in_features, out_features, bias=bias, dtype=torch.float32)
        self.heads = list(heads) or [out_features]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            # DeepSpeed and FSDP may have cast the weights to half precision.
            bias = None if self.bias is None else self.bias.float()
            weight = self.weight.float()
            if (count := len(self.heads)) > 1:  # what is between them has no gradient, and stays 0
                rows = enumerate(weight.split(self.heads))
                weight = torch.block_diag(*(of.chunk(count, 1)[place] for place, of in rows))
            return nn.functional.linear(input.float(), weight, bias)


class Float32GroupNorm(nn.GroupNorm):
    """A normalisation in float32, as `Float32Linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = self.weight.float(), self.bias.float()
            return nn.functional.group_norm(input.float(), self.num_groups, weight, bias, self.eps)


@dataclass(frozen=True)
class Head:
    """A head as `config.reward_head` describes it: `linear`, `mlp`, or the fields of this class."""

    hidden: Sequence[int] = ()  # widths of the hidden layers, each followed by `activation`; all of them have biases
    activation: str = "silu"  # one of `ACTIVATIONS`
    bias: bool = False  # of the last layer. It moves all scores alike, so training makes none
    heads: int = 1  # side by side: from the second layer on, each sees no channel of another
    groups: int = 0  # in which a normalisation before each activation takes the channels; 0: there is none

    def __post_init__(self):
        object.__setattr__(self, "hidden", tuple(self.hidden))

    @classmethod
    def of(cls, described: str | Mapping[str, Any], width: int) -> Head:
        """Return the head described, over hidden states of `width` channels."""
        if described in HEADS:
            return cls(() if described == "linear" else (width,))
        try:
            head = cls(**described)  # ty: ignore[invalid-argument-type]
        except TypeError:
            head = None
        if head is None or head.activation not in ACTIVATIONS:
            raise CheckpointError(f"reward_head is {described!r}: use the vlmrm that wrote the checkpoint.")
        return head

    def described(self, width: int) -> str | dict[str, Any]:
        """Return the head as `config.reward_head` holds it."""
        name = next((name for name in HEADS if Head.of(name, width) == self), None)
        return name or asdict(self) | {"hidden": list(self.hidden)}

    def hidden_layers(self, width: int) -> nn.Sequential:
        """Return the hidden layers, with their activations between and after them."""
        layers: list[nn.Module] = []
        for before, after in pairwise([width, *self.hidden]):
            norm = [Float32GroupNorm(self.groups, after)] if self.groups else []
            heads = [after // self.heads] * self.heads if layers else []
            layers += [Float32Linear(before, after, heads=heads), *norm, ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers)


def at_branches(outputs: Outputs, logits: torch.Tensor) -> torch.Tensor:
    """Return each output's columns at the end of its own branch, [N, C], of `logits` [N * branches, C]."""
    if len(branches := outputs.branches) == 1:
        return logits
    each = zip(outputs, logits.unflatten(0, (-1, len(branches))).split([o.columns for o in outputs], 2), strict=True)
    return torch.cat([columns[:, branches.index(output.branch)] for output, columns in each], 1)


def split_columns(outputs: Outputs, logits: torch.Tensor) -> list[torch.Tensor]:
    """Return the columns of each output in `logits` [N, C], [N, its columns]."""
    return list(logits.split([output.columns for output in outputs], dim=1))


def places(outputs: Outputs, logits: torch.Tensor) -> torch.Tensor:
    """Return what pairs of each output compare in `logits` [N, C]: a logit, or a mean, [N, K]."""
    split = zip(outputs, split_columns(outputs, logits), strict=True)
    return torch.stack([_place(output, of) for output, of in split], 1)


def _place(output: Output, columns: torch.Tensor) -> torch.Tensor:
    if output.bins > 1:
        return _number(output, columns)
    return columns[:, 0] if output.kind == "gaussian" else columns.mean(1)


def numbers(outputs: Outputs, logits: torch.Tensor) -> torch.Tensor:
    """Return the value of each output for `logits` [N, C], in its range where it has one, [N, K]."""
    split = zip(outputs, split_columns(outputs, logits), strict=True)
    return torch.stack([_number(output, of) for output, of in split], 1)


def _number(output: Output, columns: torch.Tensor) -> torch.Tensor:
    if not output.rates:
        return columns[:, 0]
    if output.bins > 1:
        return columns.softmax(1) @ torch.linspace(0, 1, output.bins, dtype=columns.dtype, device=columns.device)
    return output.low + (output.high - output.low) * columns.sigmoid().mean(1)


def named_numbers(outputs: Outputs, logits: torch.Tensor) -> list[dict[str, float]]:
    """Return each row of `logits` [N, C] as values by name; a Gaussian output has its deviation beside its mean."""
    columns = {output.name: column for output, column in zip(outputs, numbers(outputs, logits).T, strict=True)}
    for output, of_output in zip(outputs, split_columns(outputs, logits), strict=True):
        if output.kind == "gaussian":
            columns[f"{output.name}_deviation"] = variance(of_output).sqrt()
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def total_of(outputs: Outputs, logits: torch.Tensor) -> torch.Tensor:
    """Return the one number of a model for `logits` [N, C]: the weighted sum of its outputs, [N]."""
    if len(outputs) == 1 and outputs.each[0].weight == 1:
        return numbers(outputs, logits)[:, 0]
    weights = torch.tensor([output.weight for output in outputs], device=logits.device)
    return numbers(outputs, logits) @ weights


def variance(columns: torch.Tensor) -> torch.Tensor:
    """Return the variance of a Gaussian output for its columns [N, 2], [N]: the second is log σ, as in HPSv3."""
    return (2 * columns[:, 1]).exp()


def language_loss(head: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy, at least float32, of tokens `ids` [M] by head [V, H] and hidden [M, H]."""

    def of(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(states.to(head.dtype), head)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(exact, tokens, reduction="sum")

    pieces = zip(hidden.split(LOGITS), ids.split(LOGITS), strict=True)
    # Computed again in the backward pass: a vocabulary's logits are more than all other activations.
    return torch.stack([checkpoint(of, *piece, use_reentrant=False) for piece in pieces]).sum()


def head_name(described: str | Mapping[str, Any]) -> str:
    """Return a head's name in messages: `linear`, `mlp`, or `1024-16 relu, with a bias`."""
    if isinstance(described, str):
        return described
    widths = "-".join(map(str, described["hidden"]))
    shape = f"{widths} {described['activation']}" if widths else "linear"
    return shape + (", with a bias" if described["bias"] else "")

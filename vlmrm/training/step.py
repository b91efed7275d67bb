"""A training step: the forwards of a batch, the loss over their scores, its gradient, and the figures of the log.

One loss compares the scores of a part. Where these come from several forwards (GradCache: Gao et al. 2021,
https://huggingface.co/papers/2101.06983, §3.2), all scores are computed first, without a graph, then the gradient of
the loss by each of them. With it each forward runs again, alone with its backward pass. The gradient is that of the
whole part, the memory that of one forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vlmrm.batching import ComparisonCollator, Part, to_device
from vlmrm.batching.shared import PackedLayout
from vlmrm.errors import ConfigError, TrainingError
from vlmrm.modeling.experts import Routers, balance_loss, expert_weights, find_routers
from vlmrm.modeling.head import places, total_of
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.modeling.vision import segments_of
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.losses import Objective

Inputs = Mapping[str, Any]
Score = Callable[[Inputs], torch.Tensor]  # of a forward [N, C]
# Of a GPU's use (MFU) are counted, each multiplication with its addition as 2: the matrices of a block for each of its
# tokens, and attention's two products for each pair of a query and a key that it sees. Forward, gradients by inputs
# where there are any, and by weights that are trained; what checkpointing computes again, embeddings, merger and head
# count for nothing.
# Dense bfloat16 by the data sheets, in operations a second; a part of the name that torch gives the device.
DATA_SHEET = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


@dataclass(frozen=True)
class Pass:
    """One forward and backward: the model's keywords, the loss of its scores, and the weight of its pairs."""

    inputs: Inputs
    loss: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor
    random_state: RandomState | None = None  # to draw the dropout of an earlier forward again


class TrainingStep:
    """Runs every forward and backward of a batch, and adds up the figures for the log.

    `model` is without adapters and wrappers, `autocast` HF's context of a forward; `prepare` moves its inputs to the
    device. `collator` makes empty parts for ranks that have fewer forwards than others.
    """

    def __init__(
        self,
        model: Any,
        args: RewardTrainingArguments,
        accelerator: Accelerator,
        *,
        autocast: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[Inputs], Inputs],
        collator: ComparisonCollator,
    ):
        self.args, self.accelerator = args, accelerator
        self.autocast, self.prepare, self.collator = autocast, prepare, collator
        self.operations = Operations(model) if data_sheet_rate(args.device) else None
        self.last_inputs: Inputs | None = None  # of the last forward, to score again before a save
        self._objective = Objective(
            args.irrelevant_loss_weight,
            args.center_rewards_coefficient,
            args.pair_loss,
            collator.outputs,
        )
        self.figures = StepFigures(self._objective)
        self._routers = Routers(find_routers(model))
        if args.router_aux_loss_coef and not self._routers.routers:
            raise ConfigError(
                f"router_aux_loss_coef is for mixtures of experts, and {type(model.model).__name__} has no routers: "
                "remove it."
            )

    def __call__(self, model: nn.Module, parts: Sequence[Part], totals: torch.Tensor, number: int) -> torch.Tensor:
        """Return this rank's share of the loss of step `number`; its gradient is reduced with the last forward.

        `totals` are the step's `judged_weights`, and its tokens of critiques, over all ranks.
        """
        # Each forward waits for all ranks, so ranks with fewer run empty ones.
        ahead, behind = self.missing(parts)  # forwards ahead of the passes, without a graph, and the passes' own
        empty = [self.collator.empty_part() for _ in range(max(ahead, behind))]
        loss, score = partial(self._loss, totals=totals[:-1]), partial(self._score, model)
        every = [*parts, *empty[:behind]]
        passes = [each for part in every for each in passes_of(part, loss, score, self.args.device)]
        for part in empty[:ahead]:
            score(part["inputs"][0])
        losses = [self._run(model, each, totals, last=each is passes[-1]) for each in passes]
        self.last_inputs = passes[-1].inputs
        # The host waits for the device once a step, whatever the number of its batches.
        for value in self.figures.read() if self.accelerator.sync_gradients else ():
            if not math.isfinite(value):
                raise not_finite(f"the loss is {value} at step {number}", self.args)
        return torch.stack(losses).sum()

    def _run(self, model: nn.Module, each: Pass, totals: torch.Tensor, last: bool) -> torch.Tensor:
        """Run one forward and its backward, and return its loss."""
        state, inputs = each.random_state, self.prepare(each.inputs)
        with self._reducing(model, last), state.again() if state else nullcontext():
            with self.autocast():
                with self._routers.watching(inputs) as decisions, self._counted():
                    output = model(**inputs)
                loss = each.loss(output.logits)
                if output.loss is not None:
                    critiques = self.collator.critique_weight * output.loss / totals[-1].clamp_min(1)
                    self.figures.beside["loss_critique"].append(critiques.detach())
                    loss = loss + critiques
                if coefficient := self.args.router_aux_loss_coef:
                    # A mean over the step's forwards, each with the weight of its pairs.
                    total = totals[:-1].sum().clamp_min(torch.finfo(torch.float32).tiny)
                    balance = coefficient * each.weight.to(total.device) / total * balance_loss(decisions)
                    self.figures.beside["loss_router"].append(balance.detach())
                    loss = loss + balance
            # Each rank's loss is its share of the step's mean, to be summed, but DDP averages gradients over ranks.
            loss = loss * self.accelerator.num_processes
            # DeepSpeed would divide by the number of accumulated batches, over which the totals are sums already.
            is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            self.accelerator.backward(loss, **({"scale_wrt_gas": False} if is_deepspeed else {}))
        return loss.detach()

    @contextmanager
    def _counted(self) -> Generator[None]:
        """Add the operations of a forward, and of its backward, to the log's figures where the device is known."""
        if self.operations is None:
            yield
            return
        self.operations.on, self.operations.done = True, 0.0
        yield
        self.operations.on = False
        self.figures.sums["operations"] += self.operations.done

    @torch.no_grad()
    def _score(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        with self.autocast():
            return model(**self.prepare(inputs)).logits

    def _loss(self, scores: torch.Tensor, part: Part, totals: torch.Tensor) -> torch.Tensor:
        """Return the loss of a part's scores, added to the log's figures."""
        part = {**part, "pairs": to_device(part["pairs"], scores.device)}
        terms = self._objective(scores, part["pairs"], totals)
        loss = torch.stack(list(terms.values())).sum()
        self.figures.add(scores.detach(), part, terms, loss)
        return loss

    def missing(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Return how many more forwards another rank has: without a graph, and with a backward pass.

        The token budget may split its batch otherwise.
        """
        counts = [len(part["inputs"]) for part in parts]
        own = torch.tensor([[sum(count for count in counts if count > 1), sum(counts)]], device=self.args.device)
        if self.args.world_size == 1 or self.collator.max_tokens_per_batch is None:
            return 0, 0
        ahead, behind = (self.accelerator.gather(own).amax(0) - own[0]).tolist()
        return ahead, behind

    @contextmanager
    def _reducing(self, model: nn.Module, last: bool) -> Generator[None]:
        """Delay the reduction of gradients, and DeepSpeed's step, until the last forward."""
        if last or not self.accelerator.sync_gradients:
            yield
            return
        self.accelerator.sync_gradients = False
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        try:
            with nullcontext() if is_deepspeed else self.accelerator.no_sync(model):
                yield
        finally:
            self.accelerator.sync_gradients = True


def passes_of(part: Part, loss: Callable[..., torch.Tensor], score: Score, device: torch.device) -> list[Pass]:
    """Return the passes of a part: their losses add up to `loss(scores, part=part)`, and so do the gradients.

    `score`, the forward on `device` without a graph, is called for each forward of a part that has several.
    """

    def in_order(scores: torch.Tensor) -> torch.Tensor:
        return loss(scores[part["order"].to(scores.device)], part=part)

    weight = part["pairs"]["weight"].sum() / len(part["inputs"])
    if len(part["inputs"]) == 1:
        return [Pass(part["inputs"][0], in_order, weight)]
    states, pieces = [], []
    for inputs in part["inputs"]:
        states.append(RandomState.now(device))
        pieces.append(score(inputs))
    scores = torch.cat(pieces).requires_grad_()
    value = in_order(scores)
    [gradient] = torch.autograd.grad(value, scores)
    shares = gradient.split([len(piece) for piece in pieces])
    of_piece = value.detach() / len(pieces)
    return [
        Pass(inputs, partial(with_gradient, gradient=share, value=of_piece), weight, state)
        for inputs, share, state in zip(part["inputs"], shares, states, strict=True)
    ]


def with_gradient(scores: torch.Tensor, gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value`, with this gradient [N, C] by the scores [N, C]."""
    # The product's derivative by each score is the gradient; a constant brings its value to `value`.
    product = (scores * gradient).sum()
    return product + (value - product).detach()


def not_finite(finding: str, args: RewardTrainingArguments) -> TrainingError:
    return TrainingError(
        f"{finding}: lower learning_rate or max_grad_norm and continue with --resume_from_checkpoint auto, from the "
        f"last checkpoint in {args.output_dir} or from the beginning."
    )


@dataclass(frozen=True)
class RandomState:
    """The state of torch's generators, of the CPU and of `device` if that is another."""

    device: torch.device
    on_cpu: torch.Tensor
    on_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), on_device)

    @contextmanager
    def again(self) -> Generator[None]:
        """Draw from this state inside, and afterwards go on as if nothing had been drawn."""
        devices = [] if self.on_device is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.set_rng_state(self.on_cpu)
            if self.on_device is not None:
                torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
            yield


# Names are TRL's where TRL has one.
BESIDE = ("loss_router", "loss_critique")  # of a forward, and not of its scores
SUMMED = (
    *("pairs", "correct", "margin", "rewards", "reward", "irrelevant_pairs", "irrelevant_margin"),
    *(*BESIDE, "dropped_rows", "operations"),
)
PER_PAIR = {"accuracy": "correct", "margin": "margin"}


class StepFigures:
    """Figures of the training log: sums over steps on each rank, which `flush` turns into means over all ranks."""

    def __init__(self, objective: Objective):
        self._outputs, self._terms = objective.outputs, [f"loss_{name}" for name in objective.terms]
        self._names = [*SUMMED, *self._terms]
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(self._names, 0.0)
        self.lowest, self.highest = math.inf, -math.inf
        self.steps = self.tokens = self.pairs = 0
        self.waited = 0.0  # seconds spent waiting for batches
        self.unread: list[torch.Tensor] = []  # of the parts of this step, on the device
        self.beside: dict[str, list[torch.Tensor]] = {name: [] for name in BESIDE}  # likewise
        self.since = time.perf_counter()

    def start_step(self, tokens: int, pairs: int) -> None:
        """Count one optimizer step over all ranks."""
        self.steps += 1
        self.tokens += tokens
        self.pairs += pairs

    def add(self, logits: torch.Tensor, part: Part, terms: Mapping[str, torch.Tensor], loss: torch.Tensor) -> None:
        """Keep the figures of the logits[B, C] of one part of a batch and of the terms of its loss, for `read`."""
        logits, pairs = logits.float(), part["pairs"]
        place, scores = places(self._outputs, logits), total_of(self._outputs, logits)
        difference = place[pairs["chosen"], pairs["output"]] - place[pairs["rejected"], pairs["output"]]
        irrelevant = pairs["irrelevant"]
        judged = pairs["target"].isnan() & ~(irrelevant | pairs["tie"] | pairs["outvoted"])
        own = torch.arange(len(scores), device=scores.device) < part["rows"]["branches"].sum()
        sums = dict.fromkeys(self._names, torch.zeros((), device=scores.device)) | {
            "pairs": judged.sum(),
            "rewards": own.sum(),
            "irrelevant_pairs": irrelevant.sum(),
            "correct": (judged & (difference > 0)).sum(),
            "margin": torch.where(judged, difference, 0).sum(),
            "reward": torch.where(own, scores, 0).sum(),  # without those of irrelevant queries
            "irrelevant_margin": torch.where(irrelevant, difference, 0).sum(),
            **{f"loss_{name}": term for name, term in terms.items()},
        }
        extremes = [torch.where(own, scores, math.inf).min(), torch.where(own, scores, -math.inf).max()]
        figures = [value.detach().float() for value in (*sums.values(), *extremes, loss)]
        self.unread.append(torch.stack(figures))

    def read(self) -> list[float]:
        """Add up what was kept, and return the losses of the parts: here the host waits for the device."""
        losses = []
        for *sums, lowest, highest, loss in torch.stack(self.unread).tolist() if self.unread else ():
            for name, value in zip(self._names, sums, strict=True):
                self.sums[name] += value
            self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
            losses.append(loss)
        for name, values in self.beside.items():
            self.sums[name] += sum(value.item() for value in values)
            values.clear()
        self.unread = []
        return losses

    def flush(self, accelerator) -> dict[str, float]:
        """Return means over the steps since the last call and over all ranks. Every rank must call it."""
        seconds = max(time.perf_counter() - self.since, 1e-9)
        local = torch.tensor(list(self.sums.values()), device=accelerator.device)
        total = dict(zip(self._names, accelerator.reduce(local, "sum").tolist(), strict=True))
        extremes = accelerator.gather(torch.tensor([self.lowest, self.highest], device=accelerator.device)).view(-1, 2)
        figures = {
            **{name: total[of] / total["pairs"] for name, of in PER_PAIR.items() if total["pairs"]},
            "mean_reward": total["reward"] / max(total["rewards"], 1),
            "min_reward": extremes[:, 0].min().item(),
            "max_reward": extremes[:, 1].max().item(),
            "tokens_per_second": self.tokens / seconds,
            "pairs_per_second": self.pairs / seconds,
            "data_wait": self.waited / seconds,
            "dropped_rows": total["dropped_rows"],
        }
        if (rate := data_sheet_rate(accelerator.device)) is not None:
            figures["mfu"] = total["operations"] / seconds / rate / accelerator.num_processes
        # Each rank has its share of a step's mean loss, so the shares add up.
        further = [name for name in self.beside if total[name]]
        if further or len(self._outputs) > 1 or any(total.get(name) for name in ("irrelevant_pairs", "loss_center")):
            parts = [*further, *self._terms]
            figures |= {name: total[name] / max(self.steps, 1) for name in parts}
        if total["irrelevant_pairs"]:
            figures["irrelevant_margin"] = total["irrelevant_margin"] / total["irrelevant_pairs"]
        self._reset()
        return figures


def data_sheet_rate(device: torch.device) -> float | None:
    """Return the operations a second that a device has by its data sheet; None where it is not known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for model, rate in DATA_SHEET.items() if model in name), None)


class Matrices(NamedTuple):
    """Numbers in the matrices of a block that a token goes through: before its `mlp`, in it, and the share trained."""

    mixer: float
    mlp: float
    trained: float

    @classmethod
    def of(cls, block: nn.Module, experts: int) -> Matrices:
        shared_out = set(expert_weights(block))
        sizes = {
            name: (weight.numel() * (experts / len(weight) if name in shared_out else 1), weight.requires_grad)
            for name, weight in block.named_parameters()
            if weight.dim() > 1
        }
        total, mlp = (sum(n for name, (n, _) in sizes.items() if name.startswith(part)) for part in ("", "mlp."))
        return cls(total - mlp, mlp, sum(n for n, trained in sizes.values() if trained) / (total or 1))


class Operations:
    """Adds up the `done` operations of a model's blocks, in the forwards for which it is `on`."""

    def __init__(self, model: RewardModel):
        self.on, self.done = False, 0.0
        self._experts = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)  # that a token goes through
        self._matrices: dict[nn.Module, Matrices] = {}  # of each block, counted once: a walk takes the host longer
        for block in model.modules():
            if isinstance(block, GradientCheckpointingLayer):
                block.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self.on:
            return
        hidden: torch.Tensor = args[0] if args else keywords["hidden_states"]
        tokens, layout = hidden.numel() // hidden.shape[-1], keywords.get("layout")
        ends = len(layout.last_tokens) if isinstance(layout, PackedLayout) and hasattr(block, "ends") else tokens
        if block not in self._matrices:
            self._matrices[block] = Matrices.of(block, self._experts)
        matrices = self._matrices[block]
        products = 2 * (tokens * matrices.mixer + ends * matrices.mlp)
        learned = products * matrices.trained
        attention = 4 * hidden.shape[-1] * _pairs(hidden, keywords)
        backward = torch.is_grad_enabled() and (hidden.requires_grad or learned > 0)
        self.done += products * (1 + backward) + learned + attention * (1 + 2 * backward)


def _pairs(hidden: torch.Tensor, keywords: dict[str, Any]) -> float:
    """Return the pairs of a query and a key in a block's attention."""
    if isinstance(layout := keywords.get("layout"), PackedLayout):
        sizes = [(span.stop - span.start, span.before) for span in layout.spans]
        return sum(queries * (before + (queries + 1) / 2) for queries, before in sizes)
    if (cumulative := keywords.get("cu_seqlens")) is not None:  # of a tower
        return float(sum(length**2 for length in segments_of(cumulative).lengths))
    length = hidden.shape[-2]
    return hidden.numel() // hidden.shape[-1] * length / (2 if keywords.get("position_embeddings") is not None else 1)

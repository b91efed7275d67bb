"""TRL's RewardTrainer for comparisons: a loss over branch scores, exact evaluation, complete checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import trl
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from torch.utils.data import BatchSampler
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from vlmrm.batching import Batch, ComparisonCollator, to_device
from vlmrm.batching.pieces import log_cut
from vlmrm.engine import Engine, ScoredRow
from vlmrm.errors import RowError, ScoreError, TrainingError
from vlmrm.libraries import relies_on
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.modeling.manifest import scale_in
from vlmrm.outputs import ONE
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.callbacks import LOGGED, Bar, CurvesCallback, FiguresCallback, PreemptionCallback, RowTally
from vlmrm.training.engines import describe, own_part, reduce_all
from vlmrm.training.folder import CompleteCheckpoints, any_rank
from vlmrm.training.losses import judged_weights
from vlmrm.training.optimizer import check_rates, keep_head_in_32_bits, logged_rates, rate_of, set_rate, split_groups
from vlmrm.training.step import TrainingStep, not_finite

logger = logging.getLogger("vlmrm")

DROPPED_ROWS = "dropped_rows.jsonl"
PROBED = {name: INTERVENTIONS[name] for name in LOGGED}

relies_on(
    trl.RewardTrainer,
    *("compute_loss_context_manager", "_prepare_inputs"),
    overridden=(
        *("_prepare_dataset", "_get_dataloader", "_get_num_items_in_batch", "_save_checkpoint", "_name"),
        *("get_batch_samples", "training_step", "floating_point_ops", "log", "prediction_step"),
        *("evaluation_loop", "_run_epoch", "create_optimizer"),
    ),
    attributes=("_metrics", "model_wrapped"),
)
relies_on(Trainer.save_model, "_internal_call")


class ComparisonTrainer(CompleteCheckpoints, trl.RewardTrainer):
    """Trains a reward model of `vlmrm.modeling` on batches of `ComparisonCollator`.

    Evaluation uses the collator without irrelevant queries. `save_extras` writes the files that scoring needs into a
    checkpoint's folder, before it is declared complete.
    """

    _name = "vlmrm"

    args: RewardTrainingArguments

    def __init__(
        self,
        *,
        model,
        args,
        processor,
        collator: ComparisonCollator,
        save_extras,
        callbacks=(),
        peft_config=None,
        **kwargs,
    ):
        self.preemption, between = PreemptionCallback(), BetweenSteps(self)
        wrapped, trained = (model, {}) if peft_config is None else adapt(model, peft_config, args)
        super().__init__(
            model=wrapped,
            args=args,
            data_collator=cast(Any, collator),
            processing_class=processor.tokenizer,  # TRL asks it for the vocabulary and special tokens
            callbacks=[between, self.preemption, *callbacks],
            **kwargs,
        )
        for weight, value in trained.items():  # TRL rounds those beside 4-bit weights to bfloat16
            if weight.dtype != value.dtype:
                weight.data = value.to(weight.device)
        check_rates(args, model)
        # Our lines of figures take the place of HF's; its bar stays in a terminal, and in a notebook its table.
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None and sys.stderr.isatty():
            self.add_callback(Bar())
        self.add_callback(FiguresCallback(collator.outputs))
        self.add_callback(CurvesCallback())
        self.reward_model = model  # without the adapters around it
        if self.is_fsdp_enabled:
            half = torch.bfloat16 if args.bf16 else None
            describe(self.accelerator.state.fsdp_plugin, cast(Any, self.model), model, half)
            model.sharded = True
        self.processing_class = self.callback_handler.processing_class = processor
        self.collator = collator
        self.eval_collator = dataclasses.replace(collator, irrelevant=None, critique_weight=0.0, interventions=PROBED)
        self.step = TrainingStep(
            model,
            args,
            self.accelerator,
            autocast=self.compute_loss_context_manager,
            prepare=self._on_device,
            collator=collator,
        )
        self.save_extras = save_extras
        self.row_tally = RowTally()
        self.prove_sight: Callable[[], None] | None = None
        self.compiles: Callable[[int], bool] = lambda steps: False  # whether blocks are, once the model proved sight
        self.rates: dict[str, float] = {}  # of the last step, by key
        self._evaluated: list[ScoredRow] = []
        self.scales: dict[int, dict[str, Any]] = {}  # that of the scores of the last evaluation, by its step

    # Data -----------------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset  # nothing is tokenised ahead: media are references until the collator

    def _get_dataloader(self, dataset, *args, is_training: bool = False, **kwargs):
        # HF reads this attribute for training and evaluation alike.
        self.data_collator = self.collator if is_training else self.eval_collator
        try:
            loader = super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        finally:
            self.data_collator = self.collator
        batches: Any = getattr(loader, "batch_sampler", None)
        if is_training and getattr(batches, "num_processes", 1) > 1 and not batches.drop_last:
            batches.batch_sampler = EvenBatches(batches.batch_sampler, batches.num_processes)
            batches.batch_size = None  # of any size: none is filled
        if hasattr(loader, "device"):
            # Each forward moves its own inputs: of the rest, numbers are read that the host should not wait for.
            loader.device = None
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor:
        """Sum the weights by which a step's loss is divided: of what judges each output, irrelevant pairs, critiques.

        They are summed over the accumulated batches and all ranks, in one reduction with the counts for the log.
        """
        outputs = len(self.collator.outputs)
        judged, counts = (torch.zeros(number, dtype=torch.float64) for number in (outputs + 2, 6))
        for batch in batch_samples:
            for part in batch["parts"]:
                judged[:-1] += judged_weights(part["pairs"], outputs).cpu()
                judged[-1] += sum(len(inputs.get("taught_ids", ())) for inputs in part["inputs"])
                counts[2] += len(part["rows"]["index"])
                counts[4:] += torch.tensor(part["cut"])
            counts[:2] += torch.tensor([batch["counts"]["tokens"], batch["counts"]["pairs"]])
            counts[3] += len(batch["dropped"])
            self._report_dropped(batch["dropped"])
        totals = torch.cat([judged, counts])
        totals = totals.float()  # for accelerators without float64; exact for whole numbers below 2²⁴
        if self.accelerator.num_processes > 1:  # alone, the host need not wait for the device
            totals = self.accelerator.reduce(totals.to(device), "sum")
        numbers = totals.tolist()
        tokens, pairs, rows, dropped, uncut, cut = map(int, numbers[outputs + 2 :])
        self.state.num_input_tokens_seen += tokens
        self.step.figures.start_step(tokens=tokens, pairs=pairs)
        log_cut(uncut, cut, self.collator.max_tokens_per_batch, trained=True)
        self.row_tally.add(rows=rows, dropped=dropped, weight=sum(numbers[: outputs + 1]))
        return totals[: outputs + 2].to(device)

    def _report_dropped(self, dropped: list[tuple[int, RowError]]) -> None:
        if not dropped:
            return
        self.step.figures.sums["dropped_rows"] += len(dropped)
        self.row_tally.reason = str(dropped[-1][1])
        path = Path(self.args.output_dir) / f"rank{self.args.process_index}_{DROPPED_ROWS}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            for _, error in dropped:
                line = {"step": self.state.global_step, "id": error.row_id or "", "reason": error.reason}
                file.write(json.dumps(line) + "\n")

    def get_batch_samples(self, *args, **kwargs):
        started = time.perf_counter()
        self.step.last_inputs = None  # frees its tensors before the next batch is moved
        samples = super().get_batch_samples(*args, **kwargs)
        self.step.figures.waited += time.perf_counter() - started
        return samples

    # Training -------------------------------------------------------------------------------------------------------

    def _run_epoch(self, *args, **kwargs):
        """Train an epoch; nothing where a resumed run has done all its steps, when HF's loop would train one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, model, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not self.reward_model.training:  # a walk through all modules, while the device waits
            model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # a schedule-free one has other weights for evaluation
        with self.maybe_activation_offload_context:
            loss = self.step(model, inputs["parts"], num_items_in_batch, self.state.global_step + 1)
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        return loss

    def _on_device(self, inputs: Any) -> Any:
        """Move a batch to the device, as HF does, but without waiting for each tensor."""
        return self._prepare_inputs(to_device(inputs, self.args.device))

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the step counts them, for the MFU

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.rates)
            figures = self.step.figures.flush(self.accelerator)
            figures["num_tokens"] = self.state.num_input_tokens_seen
            # TRL's own log averages these lists into the line.
            self._metrics["train"].update({name: [value] for name, value in figures.items()})
        super().log(logs, start_time)

    def create_optimizer(self, model=None):
        """Return HF's optimizer, with groups by part of the model where parts have learning rates of their own."""
        if self.optimizer is None:
            super().create_optimizer(model)
            split_groups(self.optimizer, self.args, self.reward_model)
            keep_head_in_32_bits(self.optimizer, self.reward_model)
        return self.optimizer

    # Evaluation -----------------------------------------------------------------------------------------------------

    def prediction_step(self, model, inputs: Any, prediction_loss_only, ignore_keys=None):
        batch: Any = self._on_device(inputs)
        _, missing = self.step.missing(batch["parts"])
        batch["parts"] += [self.eval_collator.empty_part()] * missing
        with torch.no_grad(), self.compute_loss_context_manager():
            self._evaluated += Engine(model, self.eval_collator, self.args.device).score_batch(batch)
        self._report_dropped(batch["dropped"])
        return None, None, None  # HF's own gathering would pad and cut rows of unequal lengths; see evaluation_loop

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs) -> EvalLoopOutput:
        """Evaluate every row once, whatever the number of ranks: rows that samplers repeat are dropped by index."""
        from vlmrm.measures.analysis import trl_summary
        from vlmrm.measures.outputs import judged_outputs, output_figures, references, scale_of
        from vlmrm.measures.pairs import PairArrays, scored_pairs

        self._evaluated = []
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        evaluated: list[ScoredRow] = gather_object(self._evaluated)
        for error in (row.error for row in evaluated):  # every rank has all rows, so all raise
            if isinstance(error, ScoreError):
                step = self.state.global_step
                raise not_finite(f"a score of the evaluation after step {step} is not finite ({error})", self.args)
        scored = {row.index: row for row in evaluated if row.error is None}
        rows = [row for row in dataloader.dataset if row["index"] in scored]
        comparisons, outputs = [row["comparison"] for row in rows], self.eval_collator.outputs
        scores = [scored[row["index"]].scores for row in rows]
        pairs = scored_pairs(comparisons, scores, outputs)
        figures = trl_summary(pairs) if len(pairs) else {}
        judged, of_outputs = {}, {}
        if outputs != ONE:
            judged = judged_outputs(outputs, comparisons, [scored[row["index"]].outputs for row in rows])
            of_outputs = output_figures(outputs, judged)
            figures |= {f"{name}_{figure}": it for name, of in of_outputs.items() for figure, it in of.items()}
        if not figures.get("pairs") and not of_outputs:
            raise TrainingError(
                f"the evaluation has no pair with a preference: of {len(dataloader.dataset)} rows {len(rows)} were "
                f"scored, and why others were not is in *_{DROPPED_ROWS} of {self.args.output_dir}."
            )
        found = references(outputs, judged, scores, PairArrays(pairs).decided)
        self.scales = {self.state.global_step: scale_of(found)}
        wanted = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if of_outputs and self.args.load_best_model_at_end and wanted and wanted not in figures:
            names = ", ".join(name for name in figures if not name.endswith(("_ratings", "_pairs")))
            raise TrainingError(
                f"metric_for_best_model is {wanted}, which these data do not give: choose one of {names}."
            )
        if self.args.probe_samples and hasattr(dataloader.dataset, "probe"):
            figures |= dataloader.dataset.figures(scored)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        return output._replace(metrics={**(output.metrics or {}), **metrics}, num_samples=len(rows))

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def worth_saving(self) -> bool:
        return not self.row_tally.nothing_trained()

    def save_final(self, folder: Path) -> None:
        """Save the model, without optimizer state, as a complete checkpoint."""
        self.row_tally.check()
        if self.args.load_best_model_at_end and (best := self.state.best_model_checkpoint) is not None:
            self.scales = {self.state.global_step: scale_in(best)}
        with self._saving(folder):
            self.save_model(str(folder), _internal_call=True)

    def _check_finite(self) -> None:
        """Refuse to save weights that are not finite, or do not give finite scores.

        A step's loss is computed before its update: weights that the update broke show in the next forward only.
        """
        model: Any = self.model_wrapped if self.is_deepspeed_enabled or self.is_fsdp_enabled else self.model
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        finite = all(bool(own_part(weight).detach().isfinite().all()) for weight in trained)
        if self.step.last_inputs is not None:
            training = model.training
            model.eval()  # no dropout, which would draw random numbers that a resumed run does not draw
            with torch.no_grad(), self.compute_loss_context_manager():
                inputs: Any = self._on_device(self.step.last_inputs)
                scores = Engine(model, self.eval_collator, self.args.device).forward(inputs)
            model.train(training)
            finite = finite and bool(scores.isfinite().all())
        if any_rank(not finite, self.args.device):
            raise not_finite(f"weights or scores are not finite after step {self.state.global_step}", self.args)


class BetweenSteps(TrainerCallback):
    """What the trainer does between HF's own steps."""

    def __init__(self, trainer: ComparisonTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        if trainer.is_fsdp_enabled:
            reduce_all(trainer.model_wrapped, trainer.reward_model)
        if state.global_step:
            self._keep_rates(args, kwargs["lr_scheduler"])
        if trainer.prove_sight is not None:  # DeepSpeed or FSDP has wrapped the model, and its weights are in place
            trainer.prove_sight()
        if trainer.compiles(state.max_steps - state.global_step):
            from vlmrm.modeling.compiled import compile_blocks

            compile_blocks(trainer.reward_model)

    def _keep_rates(self, args: RewardTrainingArguments, scheduler: Any) -> None:
        """Keep the learning rates of this run's keys: HF would go on with those of the checkpoint."""
        schedule: Any = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
        if (lambdas := getattr(schedule, "lr_lambdas", None)) is None:
            return
        groups = schedule.optimizer.param_groups
        schedule.base_lrs = [rate_of(args, group) for group in groups]
        rates = [rate * factor(schedule.last_epoch) for rate, factor in zip(schedule.base_lrs, lambdas, strict=True)]
        schedule._last_lr = rates
        for group, base, rate in zip(groups, schedule.base_lrs, rates, strict=True):
            group["initial_lr"] = base
            set_rate(group, rate)

    def on_epoch_begin(self, args, state, control, **kwargs):
        # Its workers have it too, through shared memory, for their random choices.
        self.trainer.collator.epoch.fill_(int(state.epoch or 0))

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.rates = logged_rates(self.trainer.optimizer)


class EvenBatches(BatchSampler):
    """The batches of a sampler, and empty ones until every rank has as many; accelerate would repeat rows."""

    def __init__(self, batches: BatchSampler, ranks: int):
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self.ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()
        yield from ([] for _ in range(-super().__len__() % self.ranks))

    def __len__(self) -> int:
        return super().__len__() + -super().__len__() % self.ranks


def adapt(
    model: Any, peft_config: Any, args: RewardTrainingArguments
) -> tuple[Any, dict[torch.nn.Parameter, torch.Tensor]]:
    """Return a model with adapters, and its trained weights, in float32 unless DeepSpeed keeps float32 copies.

    Half precision would lose the updates of weights that train in full beside the adapters.
    """
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    # ZeRO-3 gathers weights of one type at once.
    whole = args.deepspeed_plugin is None or args.deepspeed_plugin.zero_stage != 3
    adapted = get_peft_model(model, peft_config, autocast_adapter_dtype=whole)
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    if (args.bf16 or args.fp16) and not args.deepspeed:
        for weight in weights:
            weight.data = weight.data.float()
        for module in adapted.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # to float32, from where autocast casts back
    return adapted, {weight: weight.data for weight in weights}

"""`vlmrm frames train`: a classifier of success from labelled frames, by HF's trainer.

After each epoch the validation frames are scored; if they are scored better than before, a threshold is chosen on them
and the checkpoint is written. With π the share of successes, the loss is that of logit - log(π / (1 - π)) (logit
adjustment, Menon et al. 2021), so that σ(logit) is the probability of a success in the data however it is balanced.

An unfinished training has its checkpoints in the folder `OUTPUT_CHECKPOINT.training`; started again, it goes on there.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from scipy.special import expit
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import ConfigError, Interrupted, Preempted, TrainingError, first_line
from vlmrm.files import make_folder, write_json
from vlmrm.modeling.manifest import read_json_of
from vlmrm.training.callbacks import Bar, FiguresCallback, PreemptionCallback
from vlmrm.training.checks import check_gpus
from vlmrm.training.folder import (
    CompleteCheckpoints,
    any_rank,
    checkpoint_to_resume,
    from_first_rank,
    output_lock,
    plain_rank_errors,
)
from vlmrm_robots.frames.card import check_card, write_card
from vlmrm_robots.frames.checkpoint import LoadedClassifier, load_classifier, read_config, save_classifier
from vlmrm_robots.frames.classifier import (
    FEATURES,
    FrameClassifier,
    ResNetClassifier,
    build_classifier,
    classifier_config,
    model_input,
)
from vlmrm_robots.frames.dataset import (
    BalancedSampler,
    FrameDataset,
    FrameIndex,
    Inputs,
    class_weights,
    first_of,
    index_frames,
    outline_of,
    split,
)
from vlmrm_robots.frames.drift import Reference
from vlmrm_robots.frames.evaluation import encoded
from vlmrm_robots.frames.qualification import (
    HeldOut,
    auc_and_loss,
    choose_threshold,
    disqualification,
    figures,
    in_words,
)
from vlmrm_robots.frames.settings import TrainSettings
from vlmrm_robots.trajectories.pictures import write_frames

logger = logging.getLogger("vlmrm")

EVALUATION_BATCH = 128
ENCODING_BATCH = 64
REFERENCE_FRAMES = 4096
DIGITS = 3  # of a validation score: smaller differences are no improvement
SHIFT = 1 / 16  # of a side, at most; 4 pixels of 64, as in DrQ (Kostrikov et al. 2021)
COLOUR = 0.2  # brightness and contrast change by at most this factor
SETTINGS = "settings.json"
# Settings with which an unfinished training may go on.
FREE = {"output_checkpoint", "epochs", "patience", "num_workers", "report_to", "use_cpu", "vis_output_dir"}
FREE |= {"visualize_positive", "target_fpr", "max_false_fires", "min_precision"}


@dataclass(frozen=True)
class TrainedClassifier(LoadedClassifier):
    """The best classifier, as its checkpoint has it; `epochs` are the (AUC, loss) on the validation frames of each."""

    epochs: list[tuple[float, float]]


def train_classifier(settings: TrainSettings) -> TrainedClassifier:
    """Train a classifier and write its checkpoint. Equal settings and data make equal weights on one machine."""
    index, summary = index_frames(
        settings.positive_dir, settings.negative_dir, settings.image_key, settings.image_size
    )
    training, validation = split(index, settings.val_fraction, settings.seed)
    if settings.output_checkpoint.is_dir():
        raise ConfigError(f"output_checkpoint {settings.output_checkpoint} is a folder: name a file.")
    check_card(settings.output_checkpoint)
    make_folder(settings.output_checkpoint.parent)
    args = training_arguments(settings)
    if args.process_index == 0:
        logger.info("%s", summary)
        logger.info("training: %s; validation: %s", index.summary(training), index.summary(validation))
        if settings.visualize_positive:
            write_frames(index.files, settings.image_key, settings.vis_output_dir, successes_only=True)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), output_lock(args), plain_rank_errors():
        resume_from = checkpoint_to_resume(args)
        begun_with = json.loads(settings.model_dump_json(exclude=FREE))
        begun_with["data"] = from_first_rank(
            lambda: data_fingerprint([str(settings.positive_dir), str(settings.negative_dir)])
        )
        if resume_from is not None:
            check_resumed(resume_from, begun_with)
        set_seed(settings.seed)
        model = initial_classifier(settings)
        origin = {
            "data_fingerprint": begun_with["data"],
            "episodes": tuple(outline_of(file, settings.image_key) for file in index.files),
            "environment": index.environment,
            "crop": index.crop,
        }
        model.spec = model.spec.model_copy(update=origin)
        trainer = FrameTrainer(model, args, settings, index, training, validation, begun_with)
        fit(trainer, resume_from)
        if args.process_index == 0:
            add_reference(settings.output_checkpoint, trainer)
            write_card(settings.output_checkpoint, read_config(settings.output_checkpoint))
            shutil.rmtree(str(args.output_dir), ignore_errors=True)
        PartialState().wait_for_everyone()
    # The model in memory is the last epoch's.
    loaded = load_classifier(settings.output_checkpoint, device=str(args.device))
    return TrainedClassifier(**vars(loaded), epochs=trainer.epochs)


def training_arguments(settings: TrainSettings) -> TrainingArguments:
    """Return HF's arguments for these settings."""
    epochly: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
    try:
        args = TrainingArguments(
            output_dir=f"{settings.output_checkpoint}.training",
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=EVALUATION_BATCH,
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            seed=settings.seed,
            bf16=settings.bf16,
            use_cpu=settings.use_cpu or not torch.accelerator.is_available(),
            dataloader_num_workers=settings.num_workers,
            dataloader_persistent_workers=settings.num_workers > 0,
            remove_unused_columns=False,
            label_names=["labels"],
            report_to=list(settings.report_to) or "none",
            save_total_limit=1,
            logging_nan_inf_filter=False,
            disable_tqdm=False,
            resume_from_checkpoint="auto",
            ddp_find_unused_parameters=False,
            **epochly,
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"the training cannot be started: {first_line(error).rstrip('.')}.") from error
    check_gpus(args.n_gpu)
    return args


def check_resumed(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint that was trained with other settings or data; ConfigError names the first."""
    before = read_json_of(checkpoint, SETTINGS) or {}
    for name, value in settings.items():
        if before.get(name) != value:
            raise ConfigError(
                f"{checkpoint.parent} holds an unfinished training with {name} {before.get(name)}, which is now "
                f"{value}: leave it as it was, or delete that folder to begin anew."
            )


def fit(trainer: FrameTrainer, resume_from: Path | None) -> None:
    """Train until patience or the epochs end; each best epoch is written at once."""
    folder = trainer.args.output_dir
    try:
        trainer.train(None if resume_from is None else str(resume_from))
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted: the same command goes on from the last whole epoch in {folder}.") from error
    if trainer.preemption.stopped_at is not None:
        raise Preempted(f"stopped by SIGTERM after saving into {folder}: the same command goes on from there.")


def add_reference(path: Path, trainer: FrameTrainer) -> None:
    """Write into a checkpoint what the frames that it knows look like to its head."""
    loaded = load_classifier(path, device=str(trainer.args.device))
    features: list[Tensor] = []
    logits: list[Tensor] = []  # of the held-out frames, which come last
    for frames in trainer.frames:
        batches = list(encoded(loaded.model, frames.read, evenly(frames.numbers, REFERENCE_FRAMES)))
        features.append(torch.cat([loaded.model.features(batch).cpu() for batch in batches]))
        logits = [loaded.model.decide(batch).cpu() for batch in batches]
    reference = Reference.fit(*features, expit(torch.cat(logits).double().numpy()))
    save_classifier(path, loaded.model, loaded.config, reference)


def evenly(numbers: np.ndarray, count: int) -> list[int]:
    """Return at most `count` of the numbers, evenly spread."""
    return numbers[np.linspace(0, len(numbers) - 1, min(count, len(numbers))).astype(int)].tolist()


def summarise(trained: TrainedClassifier) -> str:
    """Return the held-out figures of a training in a few lines."""
    metrics = trained.config.metrics
    frames, successes = (int(metrics[f"validation_{name}"]) for name in ("frames", "successes"))
    best = f"best of {len(trained.epochs)} epochs is {int(metrics['epoch'])}"
    held_out = f"on {frames} held-out frames, {successes} of them successes:"
    return f"{best}; {held_out}\n{in_words(metrics, trained.config.threshold)}\nthe classifier is {trained.path}"


def initial_classifier(settings: TrainSettings) -> FrameClassifier:
    """Return the classifier before its first step, with the pretrained encoder that settings name."""
    torchvision = settings.backbone not in ("resnet10", "reward_model")
    shared = {"image_size", "hidden_dim", "num_spatial_blocks", "pooling", "reward_model", "prompt"}
    config = classifier_config(
        architecture=settings.backbone,
        image_keys=settings.image_key,
        use_pretrain=settings.pretrained_encoder_path is not None,
        freeze_encoder=settings.frozen,
        normalisation="imagenet" if torchvision else "unit",
        **settings.model_dump(include=shared),
    )
    model = build_classifier(config)
    if settings.pretrained_encoder_path is not None and isinstance(model, ResNetClassifier):
        model.load_encoder(settings.pretrained_encoder_path)
    return model.to(memory_format=torch.channels_last)


class FrameTrainer(CompleteCheckpoints):
    """Trains a frame classifier on the frames `training` of an index, and keeps the epoch best on `validation`.

    Attributes:
        offset: log-odds of the training's successes, negated: added to a logit before the loss.
        weights: of a failure and of a success in the loss.
    """

    def __init__(
        self,
        model: FrameClassifier,
        args: TrainingArguments,
        settings: TrainSettings,
        index: FrameIndex,
        training: np.ndarray,
        validation: np.ndarray,
        begun_with: Mapping[str, Any],
    ):
        self.settings = settings
        labels = index.labels[training]
        # A classifier that begins at the prior spends no steps on learning it; the offset removes it from the loss.
        share = float(labels.mean())
        prior = float(np.log(share / (1 - share)))
        model.add_bias(prior)
        self.offset = 0.0 if settings.balance == "none" else -prior
        self.weights = torch.tensor(class_weights(labels) if settings.balance == "weights" else [1.0, 1.0]).float()
        # A frozen encoder's features are constants, unless augmentation changes the frames.
        read = index.images
        if settings.frozen and not settings.augment:
            read = cached_features(model.to(args.device), index, Path(str(args.output_dir)) / "features.npy", args)
        self.episodes = index.owners[validation]
        self.frames = (FrameDataset(read, index.labels, training), FrameDataset(read, index.labels, validation))
        self.preemption = PreemptionCallback()
        self.save_extras = lambda folder: write_json(folder / SETTINGS, dict(begun_with))
        super().__init__(
            model=model,
            args=args,
            data_collator=first_of,
            train_dataset=self.frames[0],
            eval_dataset=self.frames[1],
            compute_metrics=self._measure,
            callbacks=[self.preemption, Patience(settings.patience), FiguresCallback()],
        )
        self.classifier = model  # without DDP around it
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None and sys.stderr.isatty():
            self.add_callback(Bar())
        self.optimizer = torch.optim.Adam(model.trainable(), settings.lr)

    @property
    def epochs(self) -> list[tuple[float, float]]:
        """The (AUC, loss) on the validation frames of each epoch."""
        return [(entry["eval_auc"], entry["eval_loss"]) for entry in self.state.log_history if "eval_auc" in entry]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.settings.balance != "sampling":
            return super()._get_train_sampler(train_dataset)
        return BalancedSampler(self.frames[0].labels, self.settings.seed)

    def compute_loss(
        self, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        logits = model(self._model_inputs(model, inputs)).float()
        adjusted = logits + self.offset if model.training else logits
        weights = self.weights.to(logits.device)[labels.long()] if model.training else None
        loss = F.binary_cross_entropy_with_logits(adjusted, labels, weights)
        if model.training and not torch.isfinite(loss):
            raise TrainingError(f"the loss is {loss.item()}: lower lr, which is {self.settings.lr}.")
        return (loss, {"logits": logits}) if return_outputs else loss

    def _model_inputs(self, model: nn.Module, inputs: Inputs) -> Inputs:
        if FEATURES in inputs:
            return {FEATURES: inputs[FEATURES]}
        images = {key: model_input(frames, frames.device) for key, frames in inputs.items() if key != "labels"}
        if self.settings.augment and model.training:
            images = {key: augment(frames) for key, frames in images.items()}
        return images

    def _measure(self, scored: EvalPrediction) -> dict[str, float]:
        """Return the figures of an epoch, and write the checkpoint of the best one so far."""
        logits, labels = (np.asarray(values, dtype=np.float64) for values in (scored.predictions, scored.label_ids))
        auc, loss = auc_and_loss(logits, labels)
        by_loss = -round(loss, DIGITS)
        # The AUC soon reaches 1, where the loss decides.
        score = round(auc, DIGITS) + 1e-6 * by_loss if self.settings.select_by == "auc" else by_loss
        if score > max(scores(self.state.log_history), default=-np.inf) and self.is_world_process_zero():
            self._save_best(HeldOut(logits, labels, self.episodes))
        return {"auc": auc, "loss": loss, "score": score}

    def _save_best(self, held_out: HeldOut) -> None:
        settings, config = self.settings, self.classifier.spec
        threshold = choose_threshold(held_out, settings.target_fpr, settings.max_false_fires, settings.min_precision)
        metrics = figures(held_out, threshold)
        reason = disqualification(metrics, settings.max_false_fires, settings.min_precision)
        metrics |= {
            "epoch": len(self.epochs) + 1,
            "validation_frames": len(held_out.labels),
            "validation_successes": int(held_out.labels.sum()),
        }
        update = {
            "threshold": float(expit(threshold)),
            "metrics": metrics,
            "qualified": reason is None,
            "unqualified_because": reason,
        }
        save_classifier(settings.output_checkpoint, self.classifier, config.model_copy(update=update))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        weights = self.classifier.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: value.contiguous() for name, value in weights.items()})  # not channels last

    def _check_finite(self) -> None:
        finite = all(bool(weight.detach().isfinite().all()) for weight in self.classifier.trainable())
        if any_rank(not finite, self.args.device):
            raise TrainingError(f"weights are not finite: lower lr, which is {self.settings.lr}.")


def scores(history: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the validation score of each epoch; the highest is the best."""
    return [entry["eval_score"] for entry in history if "eval_score" in entry]


class Patience(TrainerCallback):
    """Stops after `epochs` without a better validation score; a resumed training counts those before it."""

    def __init__(self, epochs: int):
        self.epochs = epochs

    def on_evaluate(self, args, state, control, **kwargs):
        seen = scores(state.log_history)
        if len(seen) - 1 - int(np.argmax(seen)) >= self.epochs:
            control.should_training_stop = True


def cached_features(model: FrameClassifier, index: FrameIndex, file: Path, args: TrainingArguments) -> Any:
    """Return a reader of the encoder's output for frames, which the first process computes once into `file`."""
    with args.main_process_first(local=False, desc="encoding frames"):
        if args.process_index == 0:
            encode(model.eval(), index, file)
    features = np.load(file, mmap_mode="r")
    return lambda numbers: {FEATURES: torch.from_numpy(features[np.asarray(numbers)])}


@torch.inference_mode()
def encode(model: FrameClassifier, index: FrameIndex, file: Path) -> None:
    """Write the encoder's output for every frame of an index, float32 [N,...], as an .npy file."""
    make_folder(file.parent)
    features: Any = None
    for start in tqdm(range(0, len(index), ENCODING_BATCH), desc="encoding frames", unit="batch", disable=None):
        numbers = range(start, min(start + ENCODING_BATCH, len(index)))
        images = {key: model_input(frames, model.device) for key, frames in index.images(numbers).items()}
        encoded = model.encode(images).float().cpu()
        if features is None:
            shape = (len(index), *encoded.shape[1:])
            features = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
        features[start : numbers.stop] = encoded.numpy()
    features.flush()


def augment(frames: Tensor) -> Tensor:
    """Shift and recolour frames float [B,C,H,W] in [0, 1], each at random, by torch's random numbers."""
    return random_colour(random_shift(frames))


def random_shift(frames: Tensor) -> Tensor:
    """Shift each frame by whole pixels, and repeat its border."""
    # Pad, then crop at a random offset, by indices: one gather for all frames.
    count, _, height, width = frames.shape
    reach = max(1, round(SHIFT * min(height, width)))
    padded = F.pad(frames, [reach] * 4, mode="replicate").permute(0, 2, 3, 1)
    rows, columns = (
        torch.randint(2 * reach + 1, (count, 1), device=frames.device) + torch.arange(side, device=frames.device)
        for side in (height, width)
    )
    batch = torch.arange(count, device=frames.device)[:, None, None]
    return padded[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_colour(frames: Tensor) -> Tensor:
    """Change the brightness and the contrast of each frame."""
    brightness, contrast = 1 + COLOUR * (2 * torch.rand(2, len(frames), 1, 1, 1, device=frames.device) - 1)
    mean = frames.mean((1, 2, 3), keepdim=True)
    return (((frames - mean) * contrast + mean) * brightness).clamp(0, 1)

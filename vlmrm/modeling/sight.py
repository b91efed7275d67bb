"""Prove when a model is loaded that it sees, and that its shared batches are exact, on two pairs of answers.

A blind model scores as smoothly as any: transformers 5.15 to 5.17 dropped the features of images silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from PIL import Image as Pillow
from PIL import ImageOps
from transformers import ProcessorMixin

from vlmrm.batching import to_device
from vlmrm.batching.collator import branches_of
from vlmrm.conversation import Conversation, Image, Message
from vlmrm.errors import CheckpointError, ConfigError, RowError, first_line
from vlmrm.modeling.attention import attention_of, not_shared, padded_batcher, share, use_attention
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.rendering import Rendered, Renderer

# What a library raises that was made for other calls; a checkpoint unlike those tested may do so.
PROGRAM_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SIDE = 56  # pixels; processors enlarge it to what their models take
ANSWERS = ("A gradient.", "A photo of a street at night.")
# The largest relative distance between hidden states. Rounding through all layers of a large model reaches a tenth of
# these; a segment that misses its prompt, or has wrong positions, several times as much.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def prove_sight(
    model: RewardModel,
    processor: ProcessorMixin,
    *,
    name: Any,
    batching: str,
    run: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Refuse a model that does not see images, or that scores a shared and a padded batch differently.

    Two images must give different hidden states, bit for bit. With `batching: shared`, two answers about one image
    must give those of the padded batch, up to rounding; a model of a family that the tests do not cover is padded from
    here on where they do not. Three forwards; the state of the model is restored. `run` calls the model on a batch,
    where DeepSpeed or FSDP is wrapped around it.
    """
    gradient = Pillow.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB")
    inverted = ImageOps.invert(gradient.transpose(Pillow.Transpose.TRANSPOSE))
    renderer = Renderer(processor, branches=model.outputs.branches)
    try:
        pairs = [
            branches_of(_rendered(renderer, image, answer) for answer in ANSWERS) for image in (gradient, inverted)
        ]
    except RowError as error:
        raise CheckpointError(f"{name} cannot be shown an image: {error}; see its processor.") from error
    run = run or (lambda inputs: model(**to_device(inputs, model.device)))
    padded = padded_batcher(model, processor)
    shared = batching == "shared" and not_shared(model) is None
    attention, training, cache = attention_of(model), model.training, model.vision_cache
    model.eval()
    if cache is not None:
        model.identify_vision(cache)  # ZeRO-3 must not be in the middle of a forward for it
    model.vision_cache = None  # these two images are never needed again
    try:
        if shared:
            # Shared attention needs a layout, which a padded batch does not have.
            use_attention(model, "sdpa" if model.language_model._supports_sdpa else "eager")
        try:
            (reference, dtype), (reference_inverted, _) = (_hidden(model, run, padded(pair)) for pair in pairs)
        except (ConfigError, *PROGRAM_ERRORS) as error:
            raise CheckpointError(
                f"{name} cannot score a question about an image: {model.family.name} answers {first_line(error)!r}; "
                "install other versions of transformers and torch, or take another model."
            ) from error
        if torch.equal(reference, reference_inverted):
            raise CheckpointError(
                f"{name} does not see: two different images give it the same hidden states here, so that its scores "
                f"would be of the text alone; install other versions of transformers and torch, or write check_sight: "
                "false to go on."
            )
        if shared and (fault := _fault_of_sharing(model, run, pairs[0], reference, dtype)):
            if model.family.tested or model.proved:  # batches are made already for one that has proved itself
                raise CheckpointError(
                    f"the shared batch is wrong for {name}: {fault}; write batching: reference, or install other "
                    "versions of transformers and torch."
                )
            model.padded_because = f"its shared batch is wrong: {fault}"
        model.proved = model.proved or (shared and model.padded_because is None)
    finally:
        if shared:
            use_attention(model, attention)
        model.train(training)
        model.vision_cache = cache


def _fault_of_sharing(
    model: RewardModel, run: Callable, pair: Sequence[Rendered], reference: torch.Tensor, dtype: torch.dtype
) -> str | None:
    """Return what is wrong with a shared batch of two answers; `reference` [2, H] are the padded batch's states."""
    try:
        packed, _ = _hidden(model, run, share(model)(pair))
    except (ConfigError, *PROGRAM_ERRORS) as error:
        if model.family.tested and isinstance(error, ConfigError):
            raise  # a sentence of ours: it says what to do
        return f"it ends in {type(error).__name__}: {first_line(error).rstrip('.')}"
    distance = float(((packed - reference).norm(dim=1) / reference.norm(dim=1)).max())
    if dtype == torch.float32 and reference.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        dtype = torch.float16  # to which TF32 rounds
    if distance > TOLERANCE[dtype]:
        return f"hidden states are {distance:.2g} of their norm away from those of the padded batch"
    return None


def _rendered(renderer: Renderer, image: Pillow.Image, text: str) -> Rendered:
    """Return an answer to a question about an image, or the image as the answer where a text is all it takes."""
    about = Message.of("user", Image(image), "What is this?"), Message.of("assistant", text)
    try:
        return renderer.render(Conversation(about))
    except RowError:
        with suppress(RowError):
            return renderer.render(Conversation((Message.of("user", text), Message.of("assistant", Image(image)))))
        raise


@torch.no_grad()
def _hidden(model: RewardModel, run: Callable, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.dtype]:
    """Return the input of the head for a batch, float64 [N, H], and the type that computed it."""
    recorded: list[tuple[torch.Tensor, torch.dtype]] = []

    def record(module: Any, args: tuple[torch.Tensor]) -> None:
        device = args[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else args[0].dtype
        recorded.append((args[0].double(), dtype))

    # A hook, not a call of the backbone: DeepSpeed and FSDP gather weights in hooks of the whole model.
    head = getattr(model, "score_hidden", model.score)
    hook = head.register_forward_pre_hook(record)
    try:
        run(inputs)
    finally:
        hook.remove()
    return recorded[0]

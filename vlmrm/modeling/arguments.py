"""The configuration keys of the model: the checkpoint, its trained parts, and its computation."""

from __future__ import annotations

from dataclasses import dataclass

from vlmrm.errors import ConfigError
from vlmrm.libraries import parse_dtype
from vlmrm.settings import check_least, key

AUTO = "auto"


@dataclass
class ComputeArguments:
    """Keys that change how scores are computed, in training and evaluation, but not their values."""

    attn_implementation: str = key(
        "auto",
        "`flash_attention_3`, `flash_attention_2`, `sdpa` (PyTorch's own), or `auto`, the best that is installed. One"
        " that is not here is replaced by the next, which the log says.",
        ["auto", "flash_attention_3", "flash_attention_2", "sdpa"],
    )
    batching: str = key(
        "shared",
        "`shared`: prompts and images that conversations have in common are computed once. `reference`: each "
        "conversation padded and computed whole; the scores are the same.",
        ["shared", "reference"],
    )
    max_tokens_per_batch: int | None = key(
        None,
        "Most text tokens and image patches computed at once; a larger batch, or comparison, goes through in parts "
        "with the same result, and only a single conversation may be larger. Default: no limit.",
    )
    vision_cache_dir: str | None = key(
        None,
        "Folder of a cache of images as a vision tower and merger that are not trained see them: runs, sweeps and "
        "scorers may share it.",
    )
    vision_cache_gb: float = key(50.0, "Size of `vision_cache_dir` in gigabytes; images used longest ago go first.")
    check_sight: bool = key(
        True,
        "Before anything is trained or scored, the model proves that it sees: two images must give it different "
        "hidden states, and a pair in a shared batch those of the padded one.",
    )
    check_files: bool = key(True, "Hash every byte of a checkpoint against its COMPLETE.json before it is opened.")

    def __post_init__(self):
        if self.max_tokens_per_batch != AUTO:
            check_least(self, 1, "max_tokens_per_batch")


@dataclass
class ModelArguments(ComputeArguments):
    """Keys of the model to train."""

    model_name_or_path: str = key("", "Checkpoint to start from: a hub id or folder of Qwen2.5-VL, MiMo-VL, ...")
    max_tokens_per_batch: int | str | None = key(  # ty: ignore[incompatible-attribute-override]
        AUTO,
        "Most text tokens and image patches computed at once: a larger batch, or comparison, goes through in parts "
        "with the same gradient. `auto`: what the free memory allows. `null`: no limit.",
    )
    model_revision: str | None = key(None, "Branch, tag or commit of a hub checkpoint.")
    dtype: str = key(
        "auto",
        "Type of the weights: bfloat16, float16 or float32 (bf16, fp16, fp32). `auto`: float32 where they are trained"
        " under mixed precision, a half one where DeepSpeed keeps float32 copies or only an adapter is trained.",
    )
    head: str | None = key(
        None,
        "`linear`, or `mlp`: one hidden layer with SiLU before it. Default: a reward model's own, and `linear` for a "
        "new one.",
        ["linear", "mlp"],
    )
    freeze_vit: bool = key(False, "Do not train the vision tower, nor, unless `freeze_merger: false`, its merger.")
    freeze_merger: bool | None = key(
        None,
        "Do not train the merger (projector). Default: as `freeze_vit`. Under `use_peft`, `false` trains it in full "
        "beside the adapters.",
    )
    freeze_llm: bool = key(False, "Do not train the language model.")
    use_peft: bool = key(
        False, "Train LoRA adapters, of the language model alone by default, and the head instead of all."
    )
    lora_r: int = key(16, "Rank of the LoRA matrices.")
    lora_alpha: int = key(32, "Scale of the LoRA matrices.")
    lora_dropout: float = key(0.0, "Dropout before the LoRA matrices.")
    lora_target_modules: list[str] | None = key(
        None, "Names of linear layers, or routers, of the language model to adapt. Default: all linear layers."
    )
    lora_vit: bool = key(False, "Adapt the linear layers of the vision tower too; its weights stay frozen.")
    lora_merger: bool = key(
        False, "Adapt the linear layers of the merger too. `freeze_merger: false` trains it in full instead."
    )
    lora_experts: bool = key(False, "Adapt the experts of a mixture of experts too, which are no linear layers.")
    load_in_4bit: bool = key(False, "QLoRA: hold the frozen weights in 4 bits.")

    def __post_init__(self):
        if isinstance(tokens := self.max_tokens_per_batch, str) and tokens != AUTO:
            if not tokens.isdigit():
                raise ConfigError(f"max_tokens_per_batch is {tokens}: it must be a whole number, auto or null.")
            self.max_tokens_per_batch = int(tokens)
        super().__post_init__()
        self.dtype = parse_dtype(self.dtype, auto=True)
        if isinstance(self.lora_target_modules, str):
            self.lora_target_modules = [self.lora_target_modules]
        if self.vision_cache_dir and self.trains_vision:
            raise ConfigError(
                "vision_cache_dir: the features of a trained vision tower or merger change with every step: set "
                "freeze_vit: true without freeze_merger: false, under use_peft: true remove lora_vit, lora_merger and "
                "freeze_merger: false, or remove vision_cache_dir."
            )
        clashes = {
            ("lora_vit", "freeze_vit: true"): self.lora_vit and self.freeze_vit,
            ("lora_merger", "freeze_vit: true"): self.lora_merger and self.freeze_vit,
            ("lora_merger", "freeze_merger: true"): self.lora_merger and self.freeze_merger,
            ("lora_merger", "freeze_merger: false, which trains it in full"): (
                self.lora_merger and self.freeze_merger is False
            ),
            ("lora_target_modules", "freeze_llm: true"): self.lora_target_modules and self.freeze_llm,
            ("lora_experts", "freeze_llm: true"): self.lora_experts and self.freeze_llm,
        }
        for (name, frozen), clash in clashes.items():
            if clash:
                raise ConfigError(f"{name} contradicts {frozen}: remove one of the two.")
        if self.load_in_4bit and not self.use_peft:
            raise ConfigError("load_in_4bit trains nothing by itself: set use_peft: true as well.")
        check_least(self, 1, "lora_r", "lora_alpha")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}: it is a share, at least 0 and below 1.")
        if self.lora_experts and self.lora_dropout:
            raise ConfigError("lora_dropout cannot be applied to experts: remove it, or lora_experts.")

    @property
    def trains_vision(self) -> bool:
        """Whether the features of images change while training: by weights or adapters of the tower or the merger."""
        if self.use_peft:
            return self.lora_vit or self.lora_merger or self.freeze_merger is False
        return not self.freeze_vit or self.freeze_merger is False

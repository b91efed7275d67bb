"""Write docs/configuration.md, vlmrm/keys.json, and parts of docs/evaluation.md and benchmarks.md, as declared.

python docs/reference.py
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Set
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from vlmrm.commands.data import CheckArguments
from vlmrm.config import FILE, TYPES, actions_of, kinds_of, parser_of
from vlmrm.config import KINDS as KINDS_OF_KEYS
from vlmrm.data.arguments import DataArguments
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.public import BENCHMARKS, Benchmark, benchmark
from vlmrm.measures.intervals import Estimate, Interval
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS, Distribution
from vlmrm.modeling.arguments import ComputeArguments, ModelArguments
from vlmrm.training.arguments import RewardTrainingArguments

# Keys of HF's trainer that a first configuration has.
OFTEN_SET = (
    *("output_dir", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("bf16", "deepspeed", "eval_strategy", "eval_steps", "save_steps", "load_best_model_at_end"),
    *("metric_for_best_model", "resume_from_checkpoint", "logging_steps", "report_to"),
)

NOT_USED = ("max_length", "remove_unused_columns")  # TRL's and HF's, which are refused

PAGE = Path(__file__).parent / "configuration.md"
GUIDE = PAGE.with_name("evaluation.md")
PUBLIC = PAGE.with_name("benchmarks.md")
# Names of the kinds of metrics; any other kind is a list.
KINDS = {Estimate: "estimate", float: "number", int: "count", Interval: "interval", Distribution: "distribution"}

INTRODUCTION = """# Configuration

A configuration is a flat YAML or JSON file. The command line overrides the file, and the file overrides the defaults:

```bash
vlmrm train training_configs/qwen3b_config_balance_vanilla.yaml --learning_rate 5e-6
```

A value means the same in the file and on the command line; `null` means no value. Write lists as `[a, b]` in the file
and as `--key a b` on the command line. An unknown, duplicate or ill-typed key stops the program before anything is
loaded, and the message names the key you probably meant.

The files that `deepspeed` and `fsdp_config` name are searched for in the working directory, then next to the
configuration file, then one folder up. `env:` sets environment variables. `plugin:` names a Python file or module, or
several, to import first, as `--plugin FILE` does beside any verb: it may add layouts, metrics, interventions, losses,
rewards and protocols of your own ([how](contributing.md#your-own-without-a-fork)).

`vlmrm train --help` shows the keys with their defaults, `--help-all` those of Hugging Face too; `vlmrm
--install-completion` teaches bash, zsh or fish the verbs and their options.

vlmrm's own keys come first, then those of Hugging Face by topic. This page is generated:
`python docs/reference.py`."""

DATA_INTRODUCTION = """Training and evaluation read data with the same keys. Evaluation scores `dataset_path`; with
`eval_fraction` it scores the rows that a training with the same `dataset_path`, `eval_fraction` and `split_seed` held
out. It refuses keys that it would ignore: `eval_dataset_path`, `eval_dataset_split`, `max_train_samples`
and `critique_weight`; with a `benchmark` also `dataset_split`, `dataset_weights`,
`eval_fraction`, `columns` and `images`."""

INHERITED_INTRODUCTION = """Every key of `transformers.TrainingArguments` and `trl.RewardConfig` works and keeps its
meaning; defaults are theirs except for the keys above. These are the ones reward models are tuned with, and
`vlmrm train --help-all` lists all."""

# Own keys by topic. A key that no topic names is listed after them, so that a new one cannot be missing.
MODEL = {
    "Checkpoint and head": ("model_name_or_path", "model_revision", "dtype", "head"),
    "Freezing": ("freeze_vit", "freeze_merger", "freeze_llm"),
    "LoRA and QLoRA": (
        "use_peft",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_experts",
        "load_in_4bit",
    ),
    "Compute and memory": (
        "batching",
        "max_tokens_per_batch",
        "attn_implementation",
        "vision_cache_dir",
        "vision_cache_gb",
    ),
    "Checks on opening": ("check_sight", "check_files"),
}
DATA = {
    "Sources": (
        "dataset_path",
        "columns",
        "outputs",
        "total",
        "dataset_split",
        "dataset_weights",
        "max_train_samples",
        "max_eval_samples",
    ),
    "Held-out rows": ("eval_dataset_path", "eval_dataset_split", "eval_fraction", "split_seed"),
    "Images and videos": (
        "images",
        "image_root",
        "path_rewrites",
        "min_pixels",
        "max_pixels",
        "video_fps",
        "video_max_frames",
    ),
    "Length and bad rows": ("max_seq_length", "overlong", "bad_rows"),
}
EVALUATION = {
    "What to evaluate": (
        "model_dirs",
        "scorer",
        "scorer_drops_media",
        "checkpoint_pattern",
        "base_model_path",
        "benchmark",
        "data",
        "suite",
        "output_file",
    ),
    "What to measure": ("interventions", "intervention_sample", "group_by", "train_data"),
    "Choosing the best": (
        "metric_for_best",
        "fail_under",
        "save_normalization",
    ),
    "Running": ("eval_batch_size", "dtype", "dataloader_num_workers", "trust_remote_code"),
}

# Of the hundred keys that HF and TRL define, the ones that reward models are tuned with, by topic.
INHERITED = {
    "Duration and batch size": {
        "output_dir": "Folder of the checkpoints and the final model.",
        "num_train_epochs": "Passes over the training data.",
        "max_steps": "Stop after so many steps; -1: after `num_train_epochs`.",
        "per_device_train_batch_size": "Comparisons in each process at a time.",
        "gradient_accumulation_steps": "Batches in a step, which trains on this × processes × batch size comparisons.",
        "dataloader_num_workers": "Processes that open and process images.",
        "seed": "Seed of the head, the data order and dropout.",
    },
    "Optimizer and schedule": {
        "lr_scheduler_type": "`linear`, `cosine`, `constant_with_warmup`, ...",
        "warmup_steps": "Steps until the full learning rate; below 1, a share of all steps.",
        "weight_decay": "Decoupled weight decay.",
        "max_grad_norm": "Longer gradients are clipped to this norm.",
        "optim": "Optimizer.",
    },
    "Loss": {
        "center_rewards_coefficient": "Weight of (chosen + rejected)², which keeps rewards near zero.",
        "disable_dropout": "Train without dropout.",
    },
    "Precision, memory and devices": {
        "bf16": "Compute in bfloat16. `null`: yes, unless `fp16`.",
        "fp16": "Compute in float16.",
        "activation_checkpointing_kwargs": "`{every_n_layers: 2}`: of every second layer alone; `{offload: true}`: "
        "keep the inputs of layers in the memory of the host.",
        "activation_offloading": "Keep activations in the memory of the host; without DeepSpeed and FSDP.",
        "deepspeed": "DeepSpeed configuration: `zero2.json` or `zero3.json`.",
        "fsdp": "`true`: share out the weights with PyTorch's FSDP2; on one GPU, compute in bfloat16 beside float32.",
        "fsdp_config": "Configuration of FSDP2: `fsdp2.json`, or its keys.",
        "use_cpu": "Train on the CPU; set automatically where there is no GPU.",
    },
    "Evaluating": {
        "eval_strategy": "When to evaluate: `no`, `steps` or `epoch`.",
        "eval_steps": "Steps between evaluations; `logging_steps` if `null`.",
        "per_device_eval_batch_size": "Comparisons in each process at a time.",
    },
    "Saving and resuming": {
        "save_strategy": "When to save: `no`, `steps`, `epoch` or `best`.",
        "save_steps": "Steps between checkpoints.",
        "save_total_limit": "Checkpoints to keep.",
        "load_best_model_at_end": "End with the best checkpoint instead of the last weights.",
        "metric_for_best_model": "What best means: `accuracy`, `margin`, `loss`.",
        "greater_is_better": "Whether more of it is better.",
        "resume_from_checkpoint": "`auto`: continue from the newest complete checkpoint; or a checkpoint's folder.",
    },
    "Logging": {
        "logging_steps": "Steps between lines of figures.",
        "report_to": "`wandb`, `tensorboard`, `trackio` or `none`.",
        "run_name": "Name of the run there.",
        "disable_tqdm": "No progress bars.",
    },
    "Trust": {
        "trust_remote_code": "Run code that comes with the checkpoint. Leave it off for checkpoints of strangers.",
    },
}


# Figures that each intervention has.
ACCURACY = (
    "`INTERVENTION_accuracy`",
    "accuracy under an [intervention](#what-the-preference-rests-on), where it was scored",
)
RELIANCE = (
    "`INTERVENTION_reliance`",
    "accuracy that is lost where a part is removed or exchanged; of `blank_image` it is `image_reliance`",
)
LOSS = ("`INTERVENTION_loss`", "accuracy that is lost under a change that should not matter")


def page() -> str:
    """Return the whole page in Markdown."""
    declared = (*RewardTrainingArguments.__annotations__,)
    shared = {field.name for field in dataclasses.fields(ComputeArguments)}
    sections = [
        INTRODUCTION,
        "## Model",
        *topics(ModelArguments, MODEL),
        "## Data\n\n" + DATA_INTRODUCTION,
        *topics(DataArguments, DATA),
        "## Reward training\n\n" + table(RewardTrainingArguments, dict.fromkeys(declared)),
        "## Evaluation: `vlmrm eval`\n\nThese keys, those of [Data](#data), and of [Model](#model) the ones under "
        "*Compute and memory* and *Checks on opening*.",
        *topics(EvaluationArguments, EVALUATION, left_out=shared),
        "## Hugging Face\n\n" + INHERITED_INTRODUCTION,
        *(f"### {topic}\n\n{table(RewardTrainingArguments, keys)}" for topic, keys in INHERITED.items()),
    ]
    return "\n\n".join(sections) + "\n"


def keys() -> str:
    """Return vlmrm/keys.json: what help and a check of a configuration need to know of each key."""
    inherited = {name: meaning for of_topic in INHERITED.values() for name, meaning in of_topic.items()}
    compute = {topic: names for topic, names in MODEL.items() if topic in ("Compute and memory", "Checks on opening")}
    of_training = [name for name in RewardTrainingArguments.__annotations__ if name not in NOT_USED]
    train = {**MODEL, **DATA, "Reward training": of_training, "Often set, of Hugging Face's Trainer": OFTEN_SET}
    commands = {
        "train": ((ModelArguments, DataArguments, RewardTrainingArguments), train, ("transformers", "trl")),
        "check-data": ((CheckArguments, DataArguments), {"Checking": _names(CheckArguments), **DATA}, ()),
        "eval": ((EvaluationArguments, DataArguments), {**EVALUATION, **DATA, **compute}, ()),
    }
    declared = {}
    for command, (classes, of_topics, libraries) in commands.items():
        fields = {field.name: field for cls in classes for field in dataclasses.fields(cls)}
        hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
        actions = actions_of(parser_of(classes, command))
        listed = {name: topic for topic, names in of_topics.items() for name in names if name in actions}
        own = {name for cls in classes if cls is not RewardTrainingArguments for name in get_type_hints(cls)}
        more = {name: "More" for name in actions if name in own - listed.keys()}
        others = {name: None for name in actions if name not in listed | more}
        records = [
            record(fields[name], actions[name], hints[name], topic, inherited.get(name))
            for name, topic in {**listed, **more, **others}.items()
        ]
        versions = {library: metadata.version(library) for library in libraries}
        declared[command] = {"versions": versions, "keys": records}
    return _one_key_a_line(declared)


def _one_key_a_line(declared: Mapping[str, Any]) -> str:
    """Return the commands as JSON that a person can read and compare: a line for each key."""
    blocks = []
    for command, content in declared.items():
        lines = ",\n".join(json.dumps(key, ensure_ascii=False) for key in content["keys"])
        versions = json.dumps(content["versions"])
        blocks.append(f'{json.dumps(command)}: {{"versions": {versions}, "keys": [\n{lines}\n]}}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _names(arguments: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(arguments)]


def record(field: dataclasses.Field, action: Any, hint: Any, topic: str | None, meaning: str | None) -> dict[str, Any]:
    kinds = [name for name, kind in KINDS_OF_KEYS.items() if kind in kinds_of(hint)]
    return {
        "name": field.name,
        "topic": topic,
        "default": default(field),
        "meaning": meaning or " ".join(field.metadata.get("help", "").replace("%%", "%").split()),
        "type": action.type.__name__ if action.type.__name__ in TYPES else "str",
        "kinds": kinds,
        "nargs": action.nargs,
        "choices": None if action.choices is None else [str(getattr(it, "value", it)) for it in action.choices],
    }


def topics(arguments: Any, groups: Mapping[str, Iterable[str]], left_out: Set[str] = frozenset()) -> list[str]:
    """Return a section for each topic, and one for the keys that no topic names."""
    named = {name for names in groups.values() for name in names}
    unnamed = [field.name for field in dataclasses.fields(arguments) if field.name not in named | left_out]
    sections = {**groups, "More": unnamed} if unnamed else groups
    return [f"### {topic}\n\n{table(arguments, dict.fromkeys(names))}" for topic, names in sections.items()]


def with_tables(guide: str) -> str:
    """Return docs/evaluation.md with its tables, between their markers, as METRICS and INTERVENTIONS declare them."""
    tables = {"metrics of the table": metrics(in_table=True), "metrics of the details": metrics(in_table=False)}
    for name, lines in (tables | {"interventions": interventions()}).items():
        begin, end = f"<!-- {name} -->\n\n", "\n\n<!-- end -->"
        before, _, after = guide.partition(begin)
        guide = before + begin + "\n".join(lines) + end + after.partition(end)[2]
    return guide


def metrics(in_table: bool) -> list[str]:
    """Return the table of metrics; those of each intervention, which are alike, are one line of it."""
    lines: dict[str, str] = {}
    alike = {f"{name}_accuracy": ACCURACY for name in INTERVENTIONS}
    alike |= {it.loss: RELIANCE if it.removes else LOSS for it in INTERVENTIONS.values()}
    for metric in METRICS.values():
        if metric.column == in_table:
            name, meaning = alike.get(metric.name, (f"`{metric.name}`", metric.meaning))
            lines[name] = f"| {name} | {KINDS.get(metric.kind, 'list')} | {metric.better or ''} | {meaning} |"
    return ["| figure | kind | better | meaning |", "|---|---|---|---|", *lines.values()]


def interventions() -> list[str]:
    """Return the table of interventions."""
    lines = ["| name | family | the accuracy is | |", "|---|---|---|---|"]
    for it in INTERVENTIONS.values():
        notes = ["standard"] * it.standard + ["attack"] * it.attack + ["on all rows"] * (not it.sampled)
        notes += [f"repeats `{it.repeats}`"] if it.repeats else []
        lines.append(f"| `{it.name}` | {it.family} | {it.condition} | {', '.join(notes)} |")
    return lines


def with_benchmarks(guide: str) -> str:
    """Return the guide with a section for each public benchmark, which are its end."""
    return guide[: guide.index("\n### ")] + "".join(map(section, map(benchmark, BENCHMARKS)))


def section(public: Benchmark) -> str:
    """Return where a benchmark is, and who published figures."""
    source = public.source
    parts = [f"`{source.hub}`"]
    parts += [
        f"configuration{'s' * (len(source.configs) > 1)} {' '.join(f'`{name}`' for name in source.configs)}"
    ] * bool(source.configs)
    splits = " and ".join(f"`{name}`" for name in source.splits)
    parts.append(f"table `{source.file}`" if source.file else f"split{'s' * (len(source.splits) > 1)} {splits}")
    where = f"{', '.join(parts)}."
    where += f" Local copy: {' '.join(source.fetch.split())}." if source.fetch else ""
    figures = "; ".join(f"{it.source} ({it.date})" for it in public.published)
    text = " ".join(f"{where} Published: {figures}.".split())
    wrapped = textwrap.fill(text, 119, break_long_words=False, break_on_hyphens=False)
    return f"\n### {public.name}\n\n{wrapped}\n"


def table(arguments: Any, meanings: Mapping[str, str | None]) -> str:
    """Return a table of the keys of `meanings`, whose text replaces the key's own help."""
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, meaning in meanings.items():
        field = fields[name]
        lines.append(f"| `{name}` | `{default(field)}` | {meaning or field.metadata['help']} |")
    return "\n".join(lines)


def default(field: dataclasses.Field) -> str:
    """Return the default in YAML."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, str):
        return str(getattr(value, "value", value)) or '""'
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


if __name__ == "__main__":
    FILE.write_text(keys(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    GUIDE.write_text(with_tables(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    PUBLIC.write_text(with_benchmarks(PUBLIC.read_text(encoding="utf-8")), encoding="utf-8")

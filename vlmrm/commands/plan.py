"""`vlmrm init` and `plan`: a configuration that starts, for these data on this machine, and what it would do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from vlmrm.config import Configuration
from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, require_new_file, size_text, write_file
from vlmrm.logs import counted, duration, quiet_libraries, say
from vlmrm.measures.analysis import CLUSTERS
from vlmrm.training.memory import Memory
from vlmrm.training.plan import TrainingPlan, plan_training, token_figures
from vlmrm.training.recipe import (
    Machine,
    choose_method,
    configuration,
    count_parameters,
    default_model,
    facts_of_data,
    launch_of,
)
from vlmrm.training.survey import Survey

WIDTH = 12  # of the names at the left


def init_command(data: DataArguments, model: str | None, output: Path) -> None:
    """Write the configuration `output` for training on the preferences of `data`."""
    if not data.dataset_path:
        raise ConfigError("there is nothing to train on: name a file, a folder or a hub id of preferences.")
    require_new_file(output)
    machine = Machine.here()
    facts = facts_of_data(data)
    model = model or default_model(machine)
    method = choose_method(count_parameters(model), machine)
    make_folder(output.parent)
    write_file(output, configuration(facts, model, method, machine, str(output)), exclusive=True)
    say(f"wrote {output}, for {machine}: {method}, as {method.why}")
    if facts.bad_share:
        say(f"{facts.bad_share:.1%} of a sample cannot be read ({facts.reason}): such rows are skipped")
    if facts.held_out and facts.held_out_prompts < CLUSTERS:
        say(
            f"eval_fraction {facts.held_out} holds out {counted(facts.held_out_prompts, 'prompt')}, too few to tell a "
            "better checkpoint from a lucky one: add prompts, or give eval_dataset_path"
        )
    say(f"next: vlmrm plan {output}, then {launch_of(machine, str(output))}")


def plan_command(config: Configuration, as_json: bool) -> int:
    """Print the plan of a configuration; return the exit status, 0 if the training would start, else 2."""
    quiet_libraries()
    plan = plan_training(config)
    say(json.dumps(plan.as_dict(), indent=2) if as_json else format_plan(plan))
    return 2 if plan.errors else 0


def format_plan(plan: TrainingPlan) -> str:
    """Return the plan as plain text, on one screen."""
    lines = [f"{name:<{WIDTH}}{text}" for name, text in _lines(plan)]
    lines += [f"\nremark: {remark}" for remark in plan.remarks]
    lines += [f"\nerror: {error}" for error in plan.errors]
    return "\n".join([*lines, "", "It would not start." if plan.errors else "It would start."])


def _lines(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    yield "model", plan.config["model_name_or_path"]
    yield "data", ", ".join(plan.config["dataset_path"])
    for name, part, prompts in (("rows", plan.train, 0), ("evaluation", plan.held_out, plan.held_out_prompts)):
        if part is not None:
            yield name, _rows(part, prompts)
            yield "", _tokens(part)
    if plan.shared_prompts is not None:
        both, evaluated, trained = plan.shared_prompts
        yield "overlap", f"{both} of {evaluated} evaluation prompts are among {trained} of the training"
    if plan.steps:
        ranks = f" on {plan.processes} processes" if plan.processes > 1 else ""
        yield "steps", f"{plan.steps:,} of {plan.rows_per_step:,} rows, {plan.epochs:.3g} epochs{ranks}"
    yield "launch", plan.launch
    if plan.memory is not None:
        yield "memory", _memory(plan.memory)
    if (step := plan.step_seconds) is not None:
        yield "time", f"{duration(step * plan.steps)} of steps, {step:.3g} s each as measured in a trial"
    elif not plan.errors:
        yield "time", "not measured: the training does not fit into a single process here"
    if (disk := plan.disk) is not None:
        yield (
            "disk",
            f"{size_text(disk.checkpoint)} a checkpoint, {size_text(disk.kept)} in all, {size_text(disk.free)} free",
        )
    if plan.restart:
        yield "resuming", plan.restart
    for name, reason in plan.set_aside.items():
        yield "", f"sets {name} aside: {reason}"
    if plan.resumed is not None:
        yield "", f"changed: {', '.join(plan.changes) or 'nothing'}"
    yield "output", plan.config["output_dir"]


def _rows(part: Survey, prompts: int) -> str:
    rows = f"{part.rows:,}" + (f" rows of {counted(prompts, 'prompt')}" if prompts else "")
    sample = "" if part.rows == part.sampled else f" (a sample of {part.sampled:,} read)"
    reasons = "".join(f", {count:,} {reason}" for reason, count in part.reasons.most_common())
    return f"{rows}{sample}, {part.dropped_share:.1%} left out{reasons}"


def _tokens(part: Survey) -> str:
    figures = token_figures(part)
    usable = max(len(part.tokens), 1)
    media = f"{part.images / usable:.2g} images" + (f" and {part.videos / usable:.2g} videos" if part.videos else "")
    tokens = ", ".join(f"{name} {value:,.0f}" for name, value in figures.items())
    return f"tokens a row: {tokens}; {media} and {part.pairs / usable:.2g} pairs a row"


def _memory(memory: Memory) -> str:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations and the rest": memory.rest,
    }
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    return f"{size_text(memory.total)} a process of {size_text(memory.available)} free, traced\n{'':<{WIDTH}}{listed}"

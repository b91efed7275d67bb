"""`vlmrm init`: write a configuration that starts, for these data on this machine."""

from __future__ import annotations

from pathlib import Path

from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, require_new_file, write_file
from vlmrm.logs import counted, say
from vlmrm.measures.audit import PROMPTS
from vlmrm.training.recipe import (
    Machine,
    choose_method,
    configuration,
    count_parameters,
    default_model,
    facts_of_data,
    launch_of,
)


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
    if facts.held_out and facts.held_out_prompts < PROMPTS:
        say(
            f"eval_fraction {facts.held_out} holds out {counted(facts.held_out_prompts, 'prompt')}, too few to tell a "
            "better checkpoint from a lucky one: add prompts, or give eval_dataset_path"
        )
    say(f"next: vlmrm plan {output}, then {launch_of(machine, str(output))}")

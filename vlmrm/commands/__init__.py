"""The verbs of `vlmrm`."""

from collections.abc import Iterable, Sequence

from cyclopts import App


def epilogue(examples: Iterable[str]) -> str:
    """Return what the help of a verb ends with."""
    return "\n".join(["", "Examples:", "", *(f"    vlmrm {example}" for example in examples)]) + "\n"


def give_examples(app: App, examples: Sequence[str], verb: str = "") -> None:
    """Give each verb of an app those of the examples that begin with it, such as `frames train ...`."""
    for name in (name for name in app if not name.startswith("-")):
        if of_verb := [example for example in examples if f"{example} ".startswith(f"{verb}{name} ")]:
            app[name].help_epilogue = epilogue(of_verb)
            give_examples(app[name], examples, f"{verb}{name} ")

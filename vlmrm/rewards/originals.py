"""The wording of published judges, read from a checkout of the original: `vlmrm rewards record`.

It is not part of vlmrm. `originals.yaml` says where each keeps it, and how its own program sends it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter

from vlmrm.errors import ConfigError, RewardError
from vlmrm.files import make_folder, read_wording, require_new_file, write_file
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.registry import reward_model_class
from vlmrm.settings import Strict, did_you_mean, load_file

OTHER = "it is another version than vlmrm knows: write the file by hand, as docs/rewards.md says"

PURE = ("replace", "removesuffix")  # methods of texts that may be called in the making of a wording


class Original(Strict, frozen=True):
    """A published judge: the files that its reward's settings name, with `{wording: EXPRESSION}` for its texts."""

    project: str
    """Its repository."""
    sources: list[str]
    """The Python files that have the wording, in the repository or beside its installed package."""
    files: dict[str, Any]
    """By setting what the file holds: a request, or a wording alone."""
    reward: str | None = None
    """The reward of vlmrm that asks by it."""
    places: dict[str, str] = Field(default_factory=dict)
    """What its f-strings fill in, and our place for that."""
    once: tuple[str, ...] = ()
    """What each file must hold once."""
    reply: dict[str, str] = Field(default_factory=dict)
    """What fills in the form of reply that its wording asks for ..."""
    reads: float | None = None
    """... and the reward that is then read in it."""


def originals() -> dict[str, Original]:
    """Return the published judges by name."""
    table = load_file(Path(__file__).with_suffix(".yaml"))
    return TypeAdapter(dict[str, Original]).validate_python(table)


def record(name: str, checkout: Path, output: Path) -> tuple[Original, dict[str, Path]]:
    """Write the files of a published judge into the folder `output`, and return it with their paths by setting.

    Each is read back as its reward reads it, and so is a reply in the form that its wording asks for. No code of the
    checkout is run.
    """
    table = originals()
    name = name.lower()
    if name not in table:
        hint = did_you_mean(name, table, f": choose from {', '.join(table)}.")
        raise ConfigError(f"there is no original {name}{hint}")
    original = table[name]
    source = _Source(checkout, original)
    paths, replies = {}, []
    for setting, content in original.files.items():
        source.wordings.clear()
        filled = source.filled(content)
        if isinstance(filled, str):
            text, suffix = filled, "txt"
        else:
            text, suffix = yaml.safe_dump(filled, sort_keys=False, allow_unicode=True), "yaml"
        paths[setting] = output / (f"{name}.{suffix}" if len(original.files) == 1 else f"{name}.{setting}.{suffix}")
        require_new_file(paths[setting])
        make_folder(output, "--output")
        write_file(paths[setting], text)
        replies.append("\n".join(source.wordings))
    try:
        _check(name, original, paths, replies)
    except ConfigError:
        for path in paths.values():
            path.unlink()
        raise
    return original, paths


def _check(name: str, original: Original, paths: Mapping[str, Path], replies: Sequence[str]) -> None:
    """Read the files as their reward does, and in it a reply of the form that each asks for."""
    if original.once:
        for path in paths.values():
            read_wording(path, str(path), *original.once)
        return
    settings = {setting: str(path) for setting, path in paths.items()}
    arguments = RewardArguments(name, original.reward, device="cpu", extra_kwargs=settings)
    judge: Any = reward_model_class(str(original.reward))(arguments, None)
    for reply in replies if original.reads is not None else ():
        for form, filling in original.reply.items():
            reply = reply.replace(form, filling)
        try:
            read = judge.reward_in(reply)
        except RewardError as error:
            read = error
        if read != original.reads:
            raise ConfigError(
                f"{original.project} asks for another form of reply than {original.reward} reads ({read}): {OTHER}."
            )


class _Source:
    """The Python files of an original, as texts that are known without running them."""

    def __init__(self, checkout: Path, original: Original):
        self.project, self.places = original.project, original.places
        self.wordings: list[str] = []  # those that were read
        self.tree = ast.Module([], [])
        for path in (checkout / name for name in original.sources):
            try:
                self.tree.body += ast.parse(path.read_text(encoding="utf-8")).body
            except FileNotFoundError:
                raise ConfigError(
                    f"there is no {path}: give a clone of {original.project} by --checkout, or the folder in which "
                    "its package is installed."
                ) from None
            except (OSError, ValueError, SyntaxError) as error:
                raise ConfigError(f"{path} cannot be read as Python ({error}): check it.") from error

    def filled(self, content: Any) -> Any:
        """Return a content with its wordings."""
        if isinstance(content, dict) and "wording" in content:
            self.wordings.append(self._text(ast.parse(content["wording"], mode="eval").body))
            return self.wordings[-1]
        if isinstance(content, dict):
            return {key: self.filled(value) for key, value in content.items()}
        return [self.filled(item) for item in content] if isinstance(content, list) else content

    def _text(self, node: ast.expr) -> str:
        """Return the text of an expression of texts, names, f-strings, sums and methods of `PURE`."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(map(self._text, parts))
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                place = self.places.get(ast.unparse(value))
                return self._text(value) if place is None else place
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._text(left) + self._text(right)
            case ast.Call(func=ast.Attribute(value=text, attr=method), args=given, keywords=[]) if method in PURE:
                return getattr(self._text(text), method)(*map(self._text, given))
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                scopes = [each for each in ast.walk(self.tree) if getattr(each, "name", None) == owner]
                return self._assigned(name, scopes)
            case ast.Name(id=name):
                return self._assigned(name, [self.tree])
        raise self._unreadable(ast.unparse(node))

    def _assigned(self, name: str, scopes: Sequence[ast.AST]) -> str:
        """Return the text that is assigned to a name, once in the scopes, functions within included."""
        nodes = [node for scope in scopes for node in ast.walk(scope) if isinstance(node, ast.Assign)]
        values = [node.value for node in nodes if [ast.unparse(target) for target in node.targets] == [name]]
        if len(values) != 1:
            raise self._unreadable(name)
        return self._text(values[0])

    def _unreadable(self, what: str) -> ConfigError:
        return ConfigError(f"{self.project} has no {what[:80]} that is one text without being run: {OTHER}.")

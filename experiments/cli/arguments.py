"""From a command line and YAML files to one list of (key, value, where it was written), in order of precedence."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from ...compress.builder.spelling import did_you_mean
from .commands import CONFIGS

Fields: TypeAlias = dict[str, Any]  # dotted key of each field, nested dataclasses included: its type
COMMAND_LINE = ""
CONFIG_FLAG = "--config"
END_OF_OPTIONS = "--"
OF_OTHERS = {  # what other programs call an option
    "bandwidth": "link",
    "bs": "batch_size",
    "epochs": "steps",
    "gpus": "nproc",
    "iterations": "steps",
    "learning_rate": "lr",
    "link": "rate",
    "method": "compressors",
    "model_name": "model",
    "nproc_per_node": "nproc",
    "num_processes": "nproc",
    "output": "out",
    "output_dir": "out",
    "ranks": "nproc",
    "world_size": "nproc",
}
CLOSE = 0.75  # of difflib: below, names have some letters in common, and no more
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}


@dataclass(frozen=True)
class Assignment:
    """A value for a field, as text, and the file where it was written (`COMMAND_LINE` for none)."""

    key: str
    text: str
    source: str

    @property
    def shown(self) -> str:
        """The key as its writer knows it, and the file where it stands."""
        return shown(self.key, self.source) + place(self.source)


def shown(key: str, source: str) -> str:
    """`--batch-size` on the command line, `batch_size` in files."""
    return "--" + key.replace("_", "-") if source == COMMAND_LINE else key


def place(source: str) -> str:
    """` in FILE`; nothing for the command line."""
    return "" if source == COMMAND_LINE else f" in {source}"


def split_specs(text: str) -> list[str]:
    """Split comma-separated compressors, each of which may have comma-separated options.

    A piece with "=" and no ":" before it continues the options of the compressor on its left.

    >>> split_specs("powersgd:rank=1,start_iter=10,onebit")
    ['powersgd:rank=1,start_iter=10', 'onebit']
    """
    specs: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        name, equals, _ = piece.partition("=")
        if specs and equals and ":" not in name:
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return specs


def fields_of(config_class: type[Any], prefix: str = "") -> Fields:
    """All fields of a dataclass and of those nested in it: `{"steps": int, "model.width": int}`."""
    found: Fields = {}
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        key, hint = prefix + field.name, hints[field.name]
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        found |= fields_of(hint, f"{key}.") if nested else {key: hint}
    return found


def assignments(
    arguments: Sequence[str], fields: Fields, defaults: Path | None, positional: Sequence[str] = ()
) -> list[Assignment]:
    """Return the assignments of the command line and its `--config` files, in the order written: later ones win.

    `defaults` is the file that is read first where no `--config` is given. `positional` names the fields that take the
    arguments without a flag, and all that follows a `--`. Raises ValueError for what cannot be read and for unknown
    keys, saying which there are.
    """
    found: list[Assignment] = []
    words: list[str] = []
    rest = deque(arguments)
    configured = False
    while rest:
        word = rest.popleft()
        flag, equals, text = word.partition("=")
        if word == END_OF_OPTIONS:
            words += rest
            break
        if not flag.startswith("--"):
            words.append(word)
            continue
        if flag == CONFIG_FLAG:
            configured = True
            found += from_file(config_file(text if equals else _next(flag, rest)), fields)
            continue
        key = _known(flag.removeprefix("--"), fields, COMMAND_LINE)
        found.append(Assignment(key, text if equals else _next(flag, rest, fields[key]), COMMAND_LINE))
    found += _placed(words, fields, positional)
    return found if configured or defaults is None else from_file(defaults, fields) + found


def _placed(words: Sequence[str], fields: Fields, names: Sequence[str]) -> list[Assignment]:
    """Arguments without a flag, each given to its field; the last field takes all the rest where it is a list."""
    listed = names[-1] if names and item_type(fields[names[-1]]) else None
    single = names[:-1] if listed else names
    surplus = words[len(single) :]
    if surplus and not listed:
        commas = "items of a list are separated by commas, without spaces"
        takes = f"this command takes {usage(names, fields)}" if names else commas
        raise ValueError(f"unexpected argument {surplus[0]!r}; {takes}")
    found = [Assignment(name, word, COMMAND_LINE) for name, word in zip(single, words, strict=False)]
    if listed and surplus:
        found.append(Assignment(listed, json.dumps(surplus), COMMAND_LINE))
    return found


def usage(names: Sequence[str], fields: Fields) -> str:
    """Positional fields as help shows them.

    >>> usage(["base", "tests"], {"base": str, "tests": list[str]})
    'BASE TESTS...'
    """
    return " ".join(name.upper() + ("..." if item_type(fields[name]) else "") for name in names)


def _next(flag: str, rest: deque[str], hint: Any = str) -> str:
    """The value that follows a flag; a bool may go without."""
    if hint is bool and not (rest and rest[0].lower() in ("true", "false")):
        return "true"
    if not rest or rest[0].startswith("--"):
        raise ValueError(f"{flag} needs a value: {described(hint)}")
    return rest.popleft()


def config_file(text: str) -> Path:
    """A file by its path, or one that is shipped by its name, such as `powersgd-post`; ValueError where there is neither."""
    path = Path(text)
    shipped = {file.stem: file for file in CONFIGS.rglob("*.yaml")}
    if path.is_file() or text in shipped:
        return path if path.is_file() else shipped[text]
    hint = did_you_mean(path.stem, shipped)
    raise ValueError(f"cannot read {CONFIG_FLAG} {text}: No such file{hint}; shipped are: {', '.join(sorted(shipped))}")


def from_file(path: Path, fields: Fields) -> list[Assignment]:
    """Return the assignments of a YAML file. Raises ValueError if it cannot be read or has unknown keys."""
    import yaml  # here, so that a missing library is reported with the way to install it

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {CONFIG_FLAG} {path}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, Mapping | None):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not a mapping of keys to values")
    return _flattened(loaded or {}, "", fields, str(path))


def _flattened(mapping: Mapping[Any, Any], prefix: str, fields: Fields, source: str) -> list[Assignment]:
    found: list[Assignment] = []
    for name, value in mapping.items():
        key = prefix + str(name).replace("-", "_")
        if isinstance(value, Mapping) and any(field.startswith(f"{key}.") for field in fields):
            found += _flattened(value, f"{key}.", fields, source)
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            found.append(Assignment(_known(key, fields, source), text, source))
    return found


def _known(key: str, fields: Fields, source: str) -> str:
    """The field that a key means: itself, or its `name` where it is a nested dataclass."""
    key = key.replace("-", "_")
    for candidate in (key, f"{key}.name"):
        if candidate in fields:
            return candidate
    raise ValueError(_unknown(key, fields, source))


def _unknown(key: str, fields: Fields, source: str) -> str:
    group = key.rpartition(".")[0]
    members = [field for field in fields if group and field.startswith(f"{group}.")] or list(fields)
    allowed = [shown(field.removesuffix(".name") if not group else field, source) for field in members]
    names = {each.lstrip("-").replace("-", "_"): each for each in allowed}
    near = [each for each in (OF_OTHERS.get(key), *difflib.get_close_matches(key, names, 1, CLOSE)) if each in names]
    hint = f" (did you mean {names[near[0]]}?)" if near else ""
    return f"unknown option {shown(key, source)}{place(source)}{hint}; there are: {', '.join(allowed)}"


def item_type(hint: Any) -> Any | None:
    """The type of the items of a list or tuple; None for what is neither."""
    for candidate in (hint, *get_args(hint)):
        if get_origin(candidate) in (list, tuple):
            return get_args(candidate)[0]
    return None


def described(hint: Any) -> str:
    """Return the values that a field takes, in words."""
    if item := item_type(hint):
        return f"items separated by commas, each {described(item)}"
    if hint in WORDS:
        return WORDS[hint]
    return " or ".join(each if isinstance(each, str) else described(each) for each in get_args(hint)) or str(hint)

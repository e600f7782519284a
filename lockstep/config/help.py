"""What `--help` prints: the keys in groups, one group, or what a word finds."""

import difflib
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from lockstep.config.engine import SECTIONS, EngineChoice, section_of
from lockstep.config.load import leaves, section_type
from lockstep.config.presets import ALGORITHMS
from lockstep.config.reference import keys
from lockstep.errors import ConfigError

_WIDTH = 110
Key = tuple[str, Any, str]
"""Key, default, meaning."""


def command_help(root: Any, words: Sequence[str] = (), algorithm: str = "ppo") -> str:
    """The help of the command whose configuration is `root` (and whose preset is that of `algorithm`).

    Without words: usage and all keys in groups. With one: the groups of that name with defaults and meanings, else every key in whose
    name, value or meaning the words occur; `all`: everything. Raises ConfigError where it occurs nowhere.
    """
    preset = dict(leaves(ALGORITHMS[algorithm])) if root.command == "lockstep ppo" else {}
    command = root.command if algorithm == "ppo" else f"lockstep {algorithm}"
    listed = [(key, preset.get(key, default), meaning) for key, default, meaning in keys(root)]
    if not words:
        return "\n".join([*_usage(root, command, preset), *_overview(root, command, listed)])
    return _explained(" ".join(words).lower(), listed, command)


def _usage(root: Any, command: str, preset: dict[str, Any]) -> list[str]:
    lines = [f"usage: {command} [--config FILE.yaml]{root.flags} [key=value ...]", "", *textwrap.wrap(root.about, _WIDTH)]
    if preset:
        values = "  ".join(f"{key}={value}" for key, value in preset.items())
        lines += ["", f"It is {root.command} with:", textwrap.fill(values, _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return lines


def _overview(root: Any, command: str, listed: Sequence[Key]) -> list[str]:
    """Every key's name, under its group."""
    groups: dict[str, list[str]] = {}
    for key, _, _ in listed:
        group, _, name = key.rpartition(".")
        groups.setdefault(group.partition(".")[0], [])  # a section before what is in it
        groups.setdefault(group, []).append(name)
    lines = [
        "",
        f"Keys in groups. `{command} --help data` explains one group, `--help clip` searches, `--help all` explains all.",
        "Other training engines (strategy) have groups of their own: `--help megatron`, `--help torchtitan`, `--help veomni`.",
        "",
    ]
    alike: dict[tuple[str, ...], str] = {}
    others = tuple(f".{section}" for section in SECTIONS if section != section_of(EngineChoice.strategy))
    for group, names in groups.items():
        if f".{group}".endswith(others):
            continue
        first = alike.setdefault((about(root, group), *names), group)
        lines.append(f"{group}: {about(root, group) if first == group else f'as {first}'}")
        if names and first == group:
            lines.append(textwrap.fill(" ".join(names), _WIDTH, initial_indent="    ", subsequent_indent="    "))
    return lines


def about(root: Any, group: str) -> str:
    """The first sentence of what the section `group` of the configuration says of itself."""
    section = root
    for part in group.split("."):
        section = section_type(section, part)
    text = (section.__doc__ or "").splitlines()[0]
    return "" if text.startswith(f"{section.__name__}(") else re.sub(r"^`[\w.*]+`: ", "", text)


def _explained(word: str, listed: Sequence[Key], command: str) -> str:
    group = [item for item in listed if word == "all" or _is_in(word, item[0])]
    found = group or [item for item in listed if word in _text(item)]
    found = found or [item for item in listed if all(part in _text(item) for part in word.split())]
    if not found:
        words = {part for key, _, _ in listed for part in (*key.split("."), *key.rpartition(".")[2].split("_"))}
        near = difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.0)[0]
        raise ConfigError(f"no key of {command} has to do with '{word}'; the nearest word is '{near}' ({command} --help {near})")
    what = "" if word == "all" else f" of {word}" if group else f" with '{word}'"
    lines = [f"{len(found)} key{'s' if len(found) > 1 else ''}{what}:", ""]
    for key, default, meaning in found:
        lines.append(f"{key}={default}")
        lines.append(textwrap.fill(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def _text(item: Key) -> str:
    """What is searched: the key as it is and with its words apart, its default and its meaning."""
    key, default, meaning = item
    return f"{key} {re.sub('[._]', ' ', key)} {default} {meaning}".lower()


def _is_in(word: str, key: str) -> bool:
    """Whether `word` names the key itself or a section that it is in: the whole path, or its last part."""
    return f".{key.lower()}.".startswith(f".{word}.") or f".{word}." in f".{key.rpartition('.')[0].lower()}."

"""`lockstep verl-keys SCRIPT`, and `lockstep ppo --from-verl`: a verl command line, shell script or YAML file as Lockstep's arguments."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.compat.verl.keys import Verdict, is_ours, judge_all, overrides, table
from lockstep.errors import ConfigError, as_command

_USAGE = "usage: lockstep verl-keys SCRIPT.sh|CONFIG.yaml [key=value ...]"
_FLAGS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
"""Hydra's flags that have a value."""
_READ_TIMEOUT_S = 20.0
# What a script would start is printed when it names a trainer, and fails otherwise; what would end or leave the script does nothing.
_PRELUDE = """
command_not_found_handle() { case "$*" in *main_*|*trainer*) printf '\\2%s' "$@"; printf '\\1';; *) return 1;; esac; } >&2
set() { :; }; exit() { :; }; source() { :; }; cd() { :; }; kill() { :; }; trap() { :; }; wait() { :; }; exec() { "$@"; }
basename() { local p="${1%/}"; printf '%s\\n' "${p##*/}"; }; dirname() { case "$1" in */*) printf '%s\\n' "${1%/*}";; *) echo .;; esac; }
"""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Print the Lockstep command of a verl script or YAML file, and the table of its keys. 1 when a key is refused, 2 for a wrong call."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    path = Path(arguments[0])
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; {_USAGE}")
    read = read_yaml if path.suffix in (".yaml", ".yml") else read_script
    verdicts = judge_all(read(path) | read_arguments(arguments[1:]))
    print(" \\\n    ".join(["lockstep ppo", *map(shlex.quote, overrides(verdicts))]) + "\n")
    print(table(verdicts))
    return int(any(verdict.kind in ("refused", "unknown") for verdict in verdicts))


def from_verl(arguments: Sequence[str], config_file: Path | None = None) -> list[str]:
    """Lockstep's arguments for those of a verl command, laid over a YAML file of verl's; prints what was not taken as it is.

    Raises ConfigError with all keys that are refused.
    """
    verdicts = accept((read_yaml(config_file) if config_file else {}) | read_arguments(arguments))
    print("from verl:\n" + table([verdict for verdict in verdicts if verdict.kind != "accepted"]), flush=True)
    return overrides(verdicts)


def accept(given: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts on these keys of verl's. Raises ConfigError with all that are refused."""
    verdicts = judge_all(given)
    refused = [verdict for verdict in verdicts if verdict.kind in ("refused", "unknown")]
    if refused:
        raise ConfigError(
            f"these keys of the verl command have no counterpart here; leave them out or change them:\n{table(refused)}"
        )
    return verdicts


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError, with the whole table, when keys of verl's that Lockstep does not have are among the arguments."""
    try:
        given = read_arguments(arguments)
    except ConfigError:
        return  # whoever reads them next says what is wrong
    strange = {key: value for key, value in given.items() if not is_ours(key)}
    verdicts = [verdict for verdict in judge_all(strange) if verdict.kind != "default"]
    if any(verdict.kind != "unknown" for verdict in verdicts):
        raise ConfigError(
            "these arguments are verl's and not Lockstep's; --from-verl runs them as the table says (docs/from_verl.md):\n"
            + table(verdicts)
        )


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Key -> value of the overrides of a verl command; its Hydra flags are keys that begin with `--`."""
    given: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            given[_FLAGS.get(flag, flag)] = value if equals else next(words, "") if flag in (*_FLAGS, *_FLAGS.values()) else True
        else:
            key, value = _read_override(word)
            given |= dict(leaves(value, key)) if isinstance(value, dict) and value else {key: value}
    return given


def read_script(path: Path) -> dict[str, Any]:
    """Key -> value of the trainer that a shell script would start; the last one where it starts several.

    Bash reads the script in restricted mode and finds no program: it sets variables, and starts and writes nothing. Variables of this
    process's environment count, as they would in a run.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(
            "reading a shell script needs bash, which is not on the PATH; pass the script's key=value arguments instead"
        )
    # Redirections are taken out: restricted bash refuses those to files, and what is started is said on stderr.
    text = re.sub(r"(?m)(?<=\s)(?:[0-9]?>>?|&>>?)\s*(?:&[0-9]|[^\s;&|)<]+)", "", path.read_text()).replace("|&", "|")
    try:
        done = subprocess.run(
            [bash, "--norc", "--noprofile", "-r", "-c", _PRELUDE + text, str(path)],
            capture_output=True, timeout=_READ_TIMEOUT_S, env=os.environ | {"PATH": "/nonexistent"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{path} was not read in {_READ_TIMEOUT_S:.0f} s; pass its key=value arguments instead") from None
    *started, said = done.stderr.decode(errors="replace").split("\1")
    commands = [call.split("\2")[1:] for call in started if "=" in call]
    if not commands:
        raise ConfigError(f"{path} starts no trainer with key=value arguments; bash said: {said.strip() or 'nothing'}")
    if len(commands) > 1:
        print(f"{path} starts {len(commands)} trainers; this is the last", file=sys.stderr)
    # A whole command may be one word: bash -c "python -m ...".
    words = [part for word in commands[-1] for part in (shlex.split(word) if "main_" in word and " " in word else [word])]
    module = max(i for i, word in enumerate(words) if "main_" in word or ("trainer" in word and "=" not in word))
    return read_arguments([word for word in words[module + 1 :] if word])


def read_yaml(path: Path) -> dict[str, Any]:
    """Key -> value of a YAML file, with interpolations resolved."""
    try:
        node = OmegaConf.load(path)
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{path} must hold a mapping of sections, not {type(node).__name__}")
        values = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    assert isinstance(values, dict)
    return dict(leaves(values, ""))


def leaves(values: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    """Key -> value of nested mappings; an empty one is a value."""
    found = []
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        found += leaves(value, key) if isinstance(value, dict) and value else [(key, value)]
    return found


def _read_override(text: str) -> tuple[str, Any]:
    try:
        parsed = OverridesParser.create().parse_override(text)
        return parsed.key_or_group, None if parsed.is_delete() else parsed.value()
    except HydraException:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"cannot read '{text}': expected key=value") from None
        return key.lstrip("+~"), value  # what Hydra cannot read is a string

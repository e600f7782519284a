"""`lockstep verl-keys SCRIPT`, and `lockstep ppo --from-verl`: a verl command line, shell script or YAML file as Lockstep's arguments."""

import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.compat.verl_keys.keys import Several, Verdict, judge_all, overrides, summary, table
from lockstep.compat.verl_keys.shell import started_commands
from lockstep.config import PPOConfig, load_config
from lockstep.config.keys import has_key, is_of_another_engine
from lockstep.config.load import leaves, plain, readable_errors
from lockstep.config.load import read_yaml as read_file
from lockstep.config.overrides import parse_override
from lockstep.errors import ConfigError, as_command

_USAGE = "usage: lockstep verl-keys SCRIPT.sh|CONFIG.yaml [key=value ...]"
_HELP = f"""{_USAGE}

Print what becomes of each key of a verl shell script or YAML file, and the Lockstep command that runs it. Arguments after the file are
laid over it; ~KEY removes a key. If a key is refused, no command is printed and the exit status is 1.

Python code of verl's is another matter: rename the package and put `import lockstep.compat.verl` before it (docs/from_verl.md)."""
_FLAGS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
"""Hydra's flags that have a value."""
_MODULE = re.compile(r"(?:[\w./-]*[./])?(?:main_\w+|\w+_trainer)(?:\.py)?")
"""What a script starts: verl.trainer.main_ppo, recipe/dapo/main_dapo.py."""
_HYDRAS = (*_FLAGS, "--config", "-m", "--multirun", "-r", "--run", "-c", "--cfg", "-p", "--package", "-i", "--info", "--hydra", "--resolve",
           "--experimental", "--shell-completion", "--version")  # fmt: skip
"""How Hydra's flags begin."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Print what becomes of each key of a verl script or YAML file, and the Lockstep command.

    Return 1 if a key is refused, 2 for a wrong call.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if arguments else 2
    path = Path(arguments[0])
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; {_USAGE}")
    read = read_yaml if path.suffix in (".yaml", ".yml") else read_script
    removed = [word[1:] for word in arguments[1:] if word.startswith("~")]
    given = read(path) | read_arguments([word for word in arguments[1:] if not word.startswith("~")])
    verdicts = judge_all({key: value for key, value in given.items() if key not in removed})
    print(table(verdicts))
    print()
    is_complete = not any(verdict.is_refused for verdict in verdicts)
    if is_complete:
        print(" \\\n    ".join(["lockstep ppo", *map(_shell_word, overrides(verdicts))]))
        print()
    print(summary(verdicts))
    return int(not is_complete)


def _shell_word(text: str) -> str:
    """The text as a word of a shell, in double quotes if it has single ones."""
    if "'" in text and not set(text) & set('"$`\\!'):
        return f'"{text}"'
    return shlex.quote(text)


def from_verl(arguments: Sequence[str], config_file: Path | None = None) -> list[str]:
    """Return Lockstep's arguments for those of a verl command, laid over a YAML file of verl's.

    Print the keys that are not accepted as they are. Raise ConfigError with all keys that are refused.
    """
    verdicts = accept((read_yaml(config_file) if config_file else {}) | read_arguments(arguments))
    print(f"from verl:\n{table(verdicts)}\n{summary(verdicts)}", flush=True)
    return overrides(verdicts)


def accept(given: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts on these keys of verl's. Raise ConfigError with all that are refused."""
    verdicts = judge_all(given)
    refused = [verdict for verdict in verdicts if verdict.is_refused]
    if refused:
        raise ConfigError(f"these keys of verl's are refused; change them or leave them out:\n{table(refused)}")
    return verdicts


def our_config(config: Any, *ignored: Any, **also_ignored: Any) -> PPOConfig:
    """Return what a configuration with verl's keys means here. Raise ConfigError with all keys that are refused."""
    if isinstance(config, PPOConfig):
        return config
    verdicts = accept(dict(leaves(plain(config))))
    # A whole tree names every key: verl's defaults, and the sections of engines that its strategies do not choose.
    arguments = overrides(verdict for verdict in verdicts if verdict.kind != "default")
    named = dict(argument.split("=", 1) for argument in arguments)
    defaults = OmegaConf.structured(PPOConfig)

    def strategy_of(key: str) -> str:
        return named.get(key) or str(OmegaConf.select(defaults, key))

    return load_config([f"{key}={value}" for key, value in named.items() if not is_of_another_engine(key, strategy_of)])


def check_arguments(arguments: Sequence[str], config_file: Path | None = None) -> None:
    """Raise ConfigError, with the table of such keys, if the file or the arguments have keys that are verl's and not Lockstep's.

    An option that neither has is a ConfigError, too.
    """
    for word in arguments:
        if word.startswith("-") and not word.partition("=")[0].startswith(_HYDRAS):
            raise ConfigError(f"there is no option {word}; expected --config FILE, --from-verl, --help, or key=value")
    try:
        given = (read_yaml(config_file) if config_file else {}) | read_arguments(arguments)
    except ConfigError:
        return  # the error of the configuration's own reader is better
    strange = {key: value for key, value in given.items() if not has_key(key)}
    verdicts = [verdict for verdict in judge_all(strange) if verdict.kind != "default"]
    if any(verdict.kind != "unknown" for verdict in verdicts):
        message = "these arguments are verl's and not Lockstep's; --from-verl runs them as the table says (docs/from_verl.md)"
        raise ConfigError(f"{message}:\n{table(verdicts)}")


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return key -> value of the overrides of a verl command. Its Hydra flags are keys that begin with `--`."""
    given: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            key, value = _read_override(word)
            given |= dict(leaves(value, f"{key}.")) if isinstance(value, dict) and value else {key: value}
            continue
        flag, equals, text = word.partition("=")
        flag = _FLAGS.get(flag, flag)
        if equals:
            given[flag] = text
        elif flag in _FLAGS.values():
            given[flag] = next(words, "")
        else:
            given[flag] = True
    file = Path(given.get("--config-path", "."), str(given.get("--config-name", "")).removesuffix(".yaml") + ".yaml")
    if not file.is_file():
        return given
    return read_yaml(file) | {key: given[key] for key in given if key not in ("--config-path", "--config-name")}


def read_script(path: Path) -> dict[str, Any]:
    """Return key -> value of the trainer that a shell script would start (`shell.py`), the last one if there are several.

    Raise ConfigError if it starts none.
    """
    started, said = started_commands(path, "*main_*|*trainer*")
    found = [_of_trainer(words) for words in started]
    commands = [words for words in found if any("=" in word for word in words)]
    if not commands:
        raise ConfigError(f"{path} starts no trainer with key=value arguments; bash said: {said or 'nothing'}")
    if len(commands) > 1:
        print(f"{path} starts {len(commands)} trainers; this is the last", file=sys.stderr)
    return read_arguments(commands[-1])


def _of_trainer(words: Sequence[str]) -> list[str]:
    """The arguments of the trainer that a command starts, or []. A whole command may be one word: bash -c "python -m ... && ..."."""
    words = [part for word in words for part in (shlex.split(word) if " " in word and _MODULE.search(word) else [word])]
    places = [i for i, word in enumerate(words) if _MODULE.fullmatch(word)]
    arguments = itertools.takewhile(lambda word: word not in ("&&", "||", "|", "&", ";"), words[places[0] + 1 :] if places else ())
    return [word.rstrip(";") for word in arguments if word]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return key -> value of a YAML file, with interpolations resolved."""
    with readable_errors():
        return dict(leaves(plain(read_file(path))))


def _read_override(text: str) -> tuple[str, Any]:
    try:
        override = parse_override(text)
    except ConfigError:
        key, equals, value = text.partition("=")
        if not equals:
            raise
        return key.lstrip("+~"), value  # an open bracket or quote is part of a text
    if override.is_delete:
        return override.key, None
    return override.key, Several(override.value) if override.is_several else override.value

"""The one way in which YAML files are read: they may come from a stranger."""

import io
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from lockstep.errors import ConfigError

_MAX_BYTES = 1_000_000
_MAX_NODES = 100_000
"""Values in a file, those of an alias counted each time that it stands there."""
_MAX_DEPTH = 50


def read_yaml(path: str | Path) -> DictConfig:
    """Return the sections of a YAML file, with interpolations as they stand.

    Raises ConfigError if it does not exist, is no YAML, holds no mapping, or is larger than any configuration: also by aliases,
    which can make a short file endless.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"the config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"the config file {path} is larger than {_MAX_BYTES:,} bytes, which no configuration is")
    try:
        text = data.decode()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        num_values = _size(root, {}, ())
        if num_values > _MAX_NODES:
            raise ConfigError(f"the config file {path} has {num_values:,} values with its aliases; at most {_MAX_NODES:,} are read")
        if isinstance(root, yaml.ScalarNode):
            raise ConfigError(f"the config file {path} must hold a mapping of sections, not one value")
        node: Any = OmegaConf.load(io.StringIO(text))
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"the config file {path} is nested too deep") from error
    except Exception as error:  # PyYAML's, OmegaConf's, and what Python says of a number or a date
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"the config file {path}{where} is not valid YAML: {problem}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"the config file {path} must hold a mapping of sections, not {type(node).__name__}")
    return node


def _size(node: yaml.Node | None, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Return the number of values in the node, with aliases written out. Raises ConfigError if it contains itself or is too deep."""
    if node is None:
        return 0
    if id(node) in above:
        raise yaml.YAMLError("an alias stands inside of what it repeats")
    if len(above) > _MAX_DEPTH:
        raise yaml.YAMLError(f"it is nested deeper than {_MAX_DEPTH} levels")
    if id(node) not in known:
        inside = (*above, id(node))
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_size(part, known, inside) for part in parts))
    return known[id(node)]

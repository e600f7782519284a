"""From a command line and a YAML file to a configuration. overrides.py reads the arguments, keys.py knows which keys there are."""

import dataclasses
import io
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from lockstep.config import follow
from lockstep.config.engine import SECTIONS, section_of
from lockstep.config.identity import redacted, remember
from lockstep.config.keys import ENGINE_KEY, check_key, is_of_another_engine, type_of
from lockstep.config.overrides import parse_override
from lockstep.config.ppo import PPOConfig
from lockstep.config.presets import (
    ALGORITHMS,
    EMBEDDED_CHANGES,
    EMBEDDED_PRESET,
    FIRST_RUN,
    first_run_on_cpu,
    first_stage_on_cpu,
    is_first_run,
)
from lockstep.errors import ConfigError

T = TypeVar("T")

_BOUND = re.compile(r"(clip\w*|_s|_bound)$")
"""Keys that bound something, where an infinity means no bound: a clip, a time, a difference."""

_EXPECTED = (
    (r"Value '(.*)' of type '\w+' could not be converted to Integer", "must be a whole number, not"),
    (r"Value '(.*)' of type '\w+' could not be converted to Float", "must be a number, not"),
    (r"Value '(.*)' is not a valid bool.*", "must be true or false, not"),
    (r"Value '(.*)' of type '\w+' is incompatible with type hint 'Union\[int, str\]'", "must be a whole number or auto, not"),
    (
        r"(?:field '.*' is not Optional|Incompatible value 'None' for field of type '.*')()",
        "must have a value; leave it out and it has its default: it cannot be null",
    ),
    (
        r"Value '?(.*?)'? \(\w+\) is incompatible with type hint 'typing\.Dict\[str, float\]'",
        "must be a mapping of judges to weights, such as {rule: 1.0, model: 0.2}, not",
    ),
    (r"Invalid value assigned: .* is not a ListConfig, list or tuple\.?()", "must be a list such as [a,b]"),
)
"""What OmegaConf says of a value of another type, and what was expected instead."""
_MAX_BYTES = 1_000_000
_MAX_NODES = 100_000
"""Values in a file, those of an alias counted each time that it stands there."""
_MAX_DEPTH = 50


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Values that are laid over the defaults, from one place."""

    origin: str
    """Where they come from, for the user to read."""
    values: Mapping[str, Any] | Sequence[tuple[str, Any]]
    """Nested, as a file has them, or key and value, as arguments are."""
    keys: tuple[str, ...]
    """The keys that they set."""
    by_user: bool = False
    """Whether the user set them."""


def load_config(overrides: Sequence[str] = (), config_file: str | Path | None = None, algorithm: str = "ppo") -> PPOConfig:
    """PPO's configuration that `overrides` ("data.train_batch_size=64", see overrides.py) and a YAML file describe.

    Values are laid over each other in this order: dataclass defaults, the embedded preset (only when neither data nor model is
    named), the preset of `algorithm`, the file, the overrides. Raises ConfigError for an unknown key (naming the nearest valid one) or a
    value that cannot work.
    """
    return of_layers(PPOConfig, read_layers(PPOConfig, overrides, config_file, algorithm))


def load_recipe(root: type[T], overrides: Sequence[str] = (), config_file: str | Path | None = None) -> T:
    """The configuration of another recipe, whose class is `root`, in the same way; without a preset."""
    return of_layers(root, read_layers(root, overrides, config_file))


def of_layers(root: type[T], layers: Sequence[Layer]) -> T:
    """The configuration `root` that has these layers over its defaults. Raises ConfigError for a value that cannot work."""
    config = _to_object(_compose(root, layers), root)
    return _with_given(config, frozenset(key for layer in layers if layer.by_user for key in layer.keys))


def _with_given(config: T, given: frozenset[str] | None) -> T:
    """The configuration, which remembers that the user set these keys."""
    setattr(config.data, "given", given)  # type: ignore[attr-defined]  # noqa: B010
    return config


def read_layers(
    root: type,
    overrides: Sequence[str] = (),
    config_file: str | Path | None = None,
    algorithm: str = "ppo",
    device_of: Callable[[str], str] | None = None,
) -> list[Layer]:
    """What is laid over the defaults of `root`, in that order. Raises ConfigError as `load_config` does for keys.

    `device_of` says which device a value of trainer.device stands for on this machine. Where it is given, and asked only where that
    matters, a run whose size is not said is smaller on a CPU (presets.py).
    """
    from_file = read_yaml(config_file) if config_file else OmegaConf.create()
    user = [Layer(f"file {config_file}", from_file, tuple(_checked_keys(from_file, root)), by_user=True)] if config_file else []
    named: list[str] = []
    given = [_read_override(text, named, root) for text in overrides]
    user.append(Layer("command line", given, tuple(named), by_user=True))
    set_by_user = {key for layer in user for key in layer.keys}
    presets = _presets(algorithm, set_by_user) if root is PPOConfig else []
    is_small = device_of is not None and is_first_run(set_by_user, root.command)  # type: ignore[attr-defined]
    if is_small and device_of(_compose(root, user).trainer.device) == "cpu":  # type: ignore[misc]
        is_ppo = root is PPOConfig
        values = first_run_on_cpu(algorithm) if is_ppo else first_stage_on_cpu(root.command, set_by_user)  # type: ignore[attr-defined]
        presets.append(Layer(FIRST_RUN, values, tuple(_leaf_keys(OmegaConf.create(values)))))
    composed = _compose(root, presets + user)
    for key in named:
        if is_of_another_engine(key, lambda name: str(OmegaConf.select(composed, name))):
            section, engine = ENGINE_KEY.fullmatch(key).groups()  # type: ignore[union-attr]
            strategies = "fsdp2 or fsdp" if engine == "fsdp_config" else engine
            raise ConfigError(
                f"{key} is read with {section}.strategy={strategies} only, and it is {OmegaConf.select(composed, f'{section}.strategy')}; "
                f"leave it out, or set {section}.strategy",
                key=key,
            )
    followed = follow.sizes_that_follow(composed, set_by_user)
    if followed:
        presets.append(Layer(follow.ORIGIN, list(followed.items()), tuple(followed)))
    return presets + user


def _presets(algorithm: str, named: set[str]) -> list[Layer]:
    """The layers below the user's, who set the keys `named`."""
    embedded = not {"data.train_files", "actor_rollout_ref.model.path"} & named
    own = ALGORITHMS[algorithm]
    presets = [("the embedded task", EMBEDDED_PRESET)] if embedded else []
    presets += [(f"lockstep {algorithm}", own)] if own else []
    presets += [("the embedded task", EMBEDDED_CHANGES[algorithm])] if embedded and algorithm in EMBEDDED_CHANGES else []
    return [Layer(origin, values, tuple(_leaf_keys(OmegaConf.create(values)))) for origin, values in presets]


def _compose(root: type, layers: Sequence[Layer]) -> Any:
    """The defaults with the layers over them."""
    with readable_errors():
        composed: Any = OmegaConf.merge(_schema(root))  # a copy, which may be changed
        for layer in layers:
            if isinstance(layer.values, Mapping | DictConfig):
                composed.merge_with(layer.values)
                continue
            for key, value in layer.values:
                # Added by force: the schema cannot know the keys of its free-form dicts; every other key was checked above.
                _update(composed, key, value)
        if root is PPOConfig and composed.algorithm.adv_estimator != "gae":
            _drop_warmup(composed, layers)
        return composed


def _update(node: Any, key: str, value: Any) -> None:
    """Set the value; a mapping is merged into the one that is there, and an empty one clears a free-form mapping."""
    is_empty = isinstance(value, Mapping | DictConfig) and not value
    clears = is_empty and not dataclasses.is_dataclass(OmegaConf.get_type(OmegaConf.select(node, key)))
    OmegaConf.update(node, key, value, merge=not clears, force_add=True)


def _drop_warmup(composed: Any, layers: Sequence[Layer]) -> None:
    """The embedded task's critic_warmup is for its critic: without one it is 0, unless the user says something else."""
    setting = [layer.values for layer in layers if "trainer.critic_warmup" in layer.keys]
    if setting == [EMBEDDED_PRESET]:
        composed.trainer.critic_warmup = 0


@cache
def _schema(root: type) -> Any:
    """The dataclasses' defaults, to be merged with (which copies) and never changed."""
    return OmegaConf.structured(root)


def as_config(config: PPOConfig | DictConfig | Mapping[str, Any]) -> PPOConfig:
    """A PPOConfig from what a program passes: one already, or a (nested) mapping over the defaults."""
    if isinstance(config, PPOConfig):
        return config
    with readable_errors():
        given = OmegaConf.create(config)  # type: ignore[arg-type]
        if not isinstance(given, DictConfig):
            raise ConfigError(f"a configuration must be a PPOConfig or a mapping of sections, not {type(config).__name__}")
        keys = tuple(_checked_keys(given, PPOConfig))
        layer = Layer("program", given, keys, by_user=True)
        followed = follow.sizes_that_follow(_compose(PPOConfig, [layer]), set(keys))
        return of_layers(PPOConfig, [Layer(follow.ORIGIN, list(followed.items()), tuple(followed)), layer])


def with_changes(config: T, changes: Mapping[str, Any]) -> T:
    """The same configuration with other values for some keys ("algorithm.adv_estimator": "grpo"), checked like any other."""
    node = OmegaConf.structured(config)
    root = type(config)
    with readable_errors():
        for key, value in changes.items():
            check_key(key, root)
            _update(node, key, value)
        return _with_given(_to_object(node, root), config.data.given)  # type: ignore[attr-defined]


def fitted(config: T, changes: Mapping[str, Any], why: str) -> T:
    """The configuration with these sizes, which follow; says so."""
    if not changes:
        return config
    print(follow.in_words(dict(changes), why), flush=True)
    return with_changes(config, changes)


def read_keys(path: str | Path) -> dict[str, Any]:
    """The keys that a YAML file sets, with their values. Raises ConfigError for an unknown one."""
    node = read_yaml(path)
    return {key: OmegaConf.select(node, key) for key in _checked_keys(node, PPOConfig)}


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The keys that overrides set, with their values. Raises ConfigError for an unknown one."""
    return dict(_read_override(text, [], PPOConfig) for text in overrides)


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML that `load_config(config_file=...)` reads back, without what is secret (`redacted`)."""
    return OmegaConf.to_yaml(OmegaConf.create(_without_other_engines(redacted(dataclasses.asdict(config)))))


def _without_other_engines(values: dict[str, Any]) -> dict[str, Any]:
    """The nested values without the sections of engines that are not chosen, where nothing in them is set."""
    kept = {}
    for name, value in values.items():
        is_other = name in SECTIONS and "strategy" in values and name != section_of(values["strategy"])
        if not (is_other and value == dataclasses.asdict(SECTIONS[name]())):
            kept[name] = _without_other_engines(value) if isinstance(value, dict) else value
    return kept


def _read_override(text: str, named: list[str], root: type) -> tuple[str, Any]:
    """The key and the value of an override; the keys that it sets, which are several for a dict, are added to `named`."""
    override = parse_override(text)
    key = override.key
    value = override.value
    if override.is_delete:
        raise ConfigError(f"'{text}' deletes a key; every key has a default, so set it instead: {key}=null", key=key)
    if isinstance(value, dict):
        named += _checked_keys(OmegaConf.create(value), root, f"{key}.")
    else:
        check_key(key, root)
        if override.is_several and type_of(key, root) not in (str, str | None, Any, None):
            raise ConfigError(
                f"'{text}' names several values; start one run for each, or write a list in brackets: {key}=[a,b] (a text with commas: "
                f"'{key}=\"a,b\"')",
                key=key,
            )
        _check_switch(key, value, root)
        named.append(key)
    return key, [value] if isinstance(value, str) and _is_list(key, root) else value


def _is_list(key: str, root: type) -> bool:
    """Whether a valid key takes a list: one word is then a list of one."""
    return typing.get_origin(type_of(key, root)) is list


def _check_switch(key: str, value: Any, root: type) -> None:
    """Raise ConfigError for a number that would switch something on without a word: -1 stands for off in other keys."""
    if type(value) is int and value not in (0, 1) and type_of(key, root) is bool:
        raise ConfigError(f"{key}={value} is neither true nor false; set one of them", key=key)


def _checked_keys(node: Any, root: type, prefix: str = "") -> list[str]:
    """The keys that the node sets, where one word that stands for a list becomes one. Raises ConfigError for an unknown one."""
    keys = list(_leaf_keys(node, prefix))
    for key in keys:
        check_key(key, root)
        value = OmegaConf.select(node, own := key.removeprefix(prefix))
        _check_switch(key, value, root)
        if isinstance(value, str) and _is_list(key, root):
            OmegaConf.update(node, own, [value])
    return keys


def _leaf_keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, DictConfig):
            yield from _leaf_keys(value, f"{key}.")
        else:
            yield key


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key and value of each leaf of nested values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def plain(values: Any) -> Any:
    """OmegaConf's containers in it, at any depth, as dicts and lists, with interpolations resolved."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values


def _to_object(node: Any, root: type[T]) -> T:
    with readable_errors():
        # Before the object is made, which gets a name that must not depend on what was loaded before.
        remember(OmegaConf.to_container(node), OmegaConf.to_container(node, resolve=True))
        config = OmegaConf.to_object(node)
        _check_numbers(OmegaConf.to_container(node, resolve=True))
    assert isinstance(config, root)
    return config


def _check_numbers(values: Any) -> None:
    """Raise ConfigError for a number that is none, and for one without end where it is not a bound: the loss would not be finite."""
    for key, value in leaves(values):
        for number in value if isinstance(value, list) else [value]:
            endless = isinstance(number, float) and not math.isfinite(number)
            if endless and (math.isnan(number) or not _BOUND.search(key)):
                raise ConfigError(f"{key}={value} is not finite; set it to a number", key=key)


@contextmanager
def readable_errors() -> Iterator[None]:
    """What OmegaConf raises inside becomes a ConfigError of one line."""
    try:
        yield
    except GrammarParseError as error:
        raise ConfigError(
            f"an interpolation cannot be read ({str(error).splitlines()[0]}); it is written ${{section.key}}, and a text that is none is "
            "written with \\${"
        ) from error
    except OmegaConfBaseException as error:
        # OmegaConf wraps what a __post_init__ raises; the user wants the message itself.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        raise (cause or _plain_error(error)) from error


def _plain_error(error: BaseException) -> ConfigError:
    """Return an error of OmegaConf as a ConfigError of one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    for pattern, expected in _EXPECTED if key else ():
        if found := re.fullmatch(pattern, lines[0]):
            return ConfigError(f"{key} {expected} {found[1]}".rstrip(), key=key)
    return ConfigError(f"{key}: {lines[0]}", key=key) if key else ConfigError(lines[0])


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

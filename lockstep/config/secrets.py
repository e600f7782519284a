"""What of a configuration must not be written down: values that came from the environment, passwords, keys."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(r"(?i)(?:^|[_.-])(?:api_?key|access_?key|private_?key|token|secret|passw(?:or)?d|credentials?|authorization)$")
"""Names of keys, of environment variables and of a URL's arguments."""
_IN_URL = re.compile(r"(?<=://)([^/\s@:]*):[^/\s@]+@")
_IN_QUERY = re.compile(r"([?&]([^=&\s]+)=)[^&\s]+")
_SHORTEST = 8
"""A shorter value of the environment is found in harmless text too."""
_interpolated: dict[str, str] = {}


def remember(raw: Any, resolved: Any) -> None:
    """Note which values of a configuration came from environment variables: `raw` has `${oc.env:NAME}` where `resolved` has the value."""
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            remember(value, resolved[name])
    elif isinstance(raw, list):
        for value, found in zip(raw, resolved, strict=True):
            remember(value, found)
    elif isinstance(raw, str) and "${oc.env:" in raw and isinstance(resolved, str):
        _interpolated[resolved] = raw


def redacted(values: Any) -> Any:
    """The values (dicts and lists of plain values, as `dataclasses.asdict` gives them) without what is secret.

    A value that came from the environment is again `${oc.env:NAME}`, which reads back. Hidden are the other values of environment variables
    and keys whose names say that they are secret, what stands below `env_vars`, and passwords and keys in URLs.
    """
    return _redacted(values, "", [value for name, value in os.environ.items() if len(value) >= _SHORTEST and _SECRET.search(name)])


def _redacted(values: Any, key: str, secrets: Sequence[str]) -> Any:
    if isinstance(values, Mapping):
        return {name: _redacted(value, "secret" if key == "env_vars" else str(name), secrets) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_redacted(value, key, secrets) for value in values]
    if not isinstance(values, str) or not values:
        return values
    if values in _interpolated:
        return _interpolated[values]
    if _SECRET.search(key):
        return HIDDEN
    text = _IN_URL.sub(rf"\1:{HIDDEN}@", values)
    text = _IN_QUERY.sub(lambda found: found[1] + HIDDEN if _SECRET.search(found[2]) else found[0], text)
    for value in secrets:
        text = text.replace(value, HIDDEN)
    return text

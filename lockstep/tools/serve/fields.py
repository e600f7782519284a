"""Read the fields of a request's JSON body by type and range. A field that nobody read is an error: no setting is ignored silently."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


class BadRequest(Exception):
    """The client's mistake: an HTTP status, OpenAI's error type and code, and which field it is about."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


_LONGEST_SHOWN = 80
"""Characters of a client's value that an error message shows."""
WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity")
)
"""Fields of OpenAI's that say nothing about the answer here."""


class Fields:
    """The fields of a JSON object. A getter returns the field's value, or `default` where it is missing or null, and raises BadRequest
    for one of another type or out of range. `finish` raises it for fields that no getter asked for."""

    def __init__(self, body: bytes) -> None:
        try:
            text = body.decode()
            values = json.loads(text)
            if "\\u" in text:  # half a character (a lone surrogate) is JSON, but no text that can be tokenised or sent back
                json.dumps(values, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(values, dict):
            raise BadRequest(f"the body is {_kind(values)}; expected a JSON object", code="invalid_json")
        self._values: Mapping[str, Any] = values
        self._read: set[str] = set(WITHOUT_EFFECT)

    def get(self, name: str) -> Any:
        """The field as it came; None where it is missing."""
        self._read.add(name)
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadRequest(f"{name} is {_kind(value)}; expected true or false", name)
        return value

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{name} is {_kind(value)}; expected a string", name)
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        if not is_integer(value):
            raise BadRequest(f"{name} is {_kind(value)}; expected an integer", name)
        if not low <= value <= high:
            raise BadRequest(f"{name}={shortened(value)} is out of range; expected {low} to {high}", name)
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"{name} is {_kind(value)}; expected a number", name)
        if not (low <= value <= high) or not math.isfinite(value):
            raise BadRequest(f"{name}={shortened(value)} is out of range; expected {low:g} to {high:g}", name)
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise BadRequest(f"{name} is {_kind(value)}; expected an object", name)
        return value

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """A string or a list of them, none of them empty."""
        value = self.get(name)
        listed = [value] if isinstance(value, str) else value or []
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise BadRequest(f"{name} is {_kind(value)}; expected a string or a list of strings", name)
        if len(listed) > most or "" in listed:
            raise BadRequest(f"{name} has {len(listed)} strings; expected at most {most}, none of them empty", name)
        return tuple(dict.fromkeys(listed))

    def integers(self, name: str, most: int) -> tuple[int, ...]:
        value = self.get(name) or []
        if not isinstance(value, list) or not all(map(is_integer, value)) or len(value) > most:
            raise BadRequest(f"{name} is {_kind(value)}; expected a list of at most {most} integers", name)
        return tuple(value)

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """A field whose other values would change the answer in a way that is not there."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise BadRequest(f"{name} is not supported: {why}", name, code="unsupported_parameter")

    def finish(self) -> None:
        """Raise BadRequest for the first field that nobody has read, unless it is null."""
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                raise BadRequest(f"the field {shortened(name)} is not known here", shortened(name), code="unknown_parameter")


def shortened(value: Any) -> str:
    """A value that a client sent, for an error message: its beginning."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def is_integer(value: Any) -> bool:
    """Whether a JSON value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    """What a value is, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")

"""Plain values as bytes, and back without trusting them: what the judge, its child and the grader say to each other.

Without imports of ours: it is sent into sandboxes in front of judge.py.
"""

from __future__ import annotations

import builtins

# Starting must be quick: typing would cost as much as everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BUNDLES = {"l": list, "t": tuple, "e": set, "z": frozenset}


def encode(value: Any, export: Any = None) -> bytes:
    """A value as ASCII: builtin values, containers of them, and the builtin types themselves. Subclasses become their base.
    `export(object) -> int` gives a number to anything else; without it that raises TypeError.
    """
    out: list[bytes] = []
    _encode(value, export, out.append)
    return b"".join(out)


def _encode(value: Any, export: Any, put: Any) -> None:
    if value is None or value is True or value is False:
        put(b"N" if value is None else b"T" if value else b"F")
    elif isinstance(value, int):
        put(b"i%x;" % value if value >= 0 else b"i-%x;" % -value)
    elif isinstance(value, float):
        put(b"f%s;" % float.hex(value).encode())
    elif isinstance(value, complex):
        put(b"c%s;%s;" % (float.hex(value.real).encode(), float.hex(value.imag).encode()))
    elif isinstance(value, str):
        raw = str.encode(value, "unicode_escape")
        put(b"s%x;%s" % (len(raw), raw))
    elif isinstance(value, bytes | bytearray):
        raw = bytes(value).hex().encode()
        put(b"b%x;%s" % (len(raw), raw))
    elif isinstance(value, type) and value in vars(builtins).values():
        put(b"y%s;" % value.__name__.encode())
    elif isinstance(value, dict):
        put(b"d%x;" % len(value))
        for key in dict.keys(value):
            _encode(key, export, put)
            _encode(dict.__getitem__(value, key), export, put)
    else:
        for tag, kind in _BUNDLES.items():
            if isinstance(value, kind):
                put(b"%s%x;" % (tag.encode(), len(value)))
                for item in value:
                    _encode(item, export, put)
                return
        if export is None:
            raise TypeError(f"{type(value).__name__} is not a plain value")
        put(b"h%x;" % export(value))


def decode(raw: bytes, imported: Any = None) -> Any:
    """What `encode` wrote. `imported(number)` stands for the objects that were exported. Raises ValueError for anything malformed."""
    try:
        value, end = _decode(raw, 0, imported)
    except (IndexError, TypeError, KeyError, RecursionError, OverflowError, UnicodeError) as error:
        raise ValueError(f"not an encoded value: {error!r}") from None
    if end != len(raw):
        raise ValueError("not an encoded value: something follows it")
    return value


def _decode(raw: bytes, at: int, imported: Any) -> tuple[Any, int]:
    tag = chr(raw[at])
    at = at + 1
    if tag in "NTF":
        return {"N": None, "T": True, "F": False}[tag], at
    end = raw.index(b";", at)
    field = raw[at:end]
    at = end + 1
    if tag == "y":
        kind = getattr(builtins, field.decode("ascii"), None)
        if not isinstance(kind, type):
            raise ValueError(f"not an encoded value: {field!r} is no builtin type")
        return kind, at
    if tag == "f":
        return float.fromhex(field.decode()), at
    if tag == "c":
        end = raw.index(b";", at)
        return complex(float.fromhex(field.decode()), float.fromhex(raw[at:end].decode())), end + 1
    number = int(field, 16)
    if tag == "i":
        return number, at
    if tag == "h":
        return imported(number), at
    if tag in "sb":
        text = raw[at : at + number]
        if number < 0 or len(text) != number:
            raise ValueError("not an encoded value: it is cut")
        return (text.decode("unicode_escape") if tag == "s" else bytes.fromhex(text.decode())), at + number
    items = []
    for _ in range(2 * number if tag == "d" else number):
        item, at = _decode(raw, at, imported)
        items.append(item)
    return (dict(zip(items[::2], items[1::2])) if tag == "d" else _BUNDLES[tag](items)), at


def to_frame(value: Any, export: Any = None) -> bytes:
    """An encoded value with its length before it."""
    raw = encode(value, export)
    return b"%08x%s" % (len(raw), raw)

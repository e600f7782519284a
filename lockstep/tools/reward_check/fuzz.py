"""Responses that a reward must survive, and what each of them may earn."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

_REPEATS = 2_000
_NESTED = 10_000
_LONG = 1_000_000
_FULL_WIDTH = {ord(digit): ord(digit) - ord("0") + 0xFF10 for digit in "0123456789"}
_ARABIC = "\u0627\u0644\u062c\u0648\u0627\u0628"  # the answer


class Earns(StrEnum):
    """What a response may earn."""

    MOST = "the most"
    """It is right."""
    ANYTHING = "anything"
    """It is right in an odd spelling: a matter of taste."""
    LESS_THAN_GOLD = "less than gold"
    NOTHING = "nothing"
    NO_ESCAPE = "nothing, unless it left the sandbox"


@dataclass(frozen=True)
class Response:
    """One response to try."""

    name: str
    text: str
    earns: Earns


def cheap_responses(prompt: str) -> Iterator[Response]:
    """What a policy finds first when a reward has a hole."""
    yield Response("empty", "", Earns.NOTHING)
    yield Response("echo of the prompt", prompt, Earns.NOTHING)
    yield Response("one word repeated", "the " * _REPEATS, Earns.NOTHING)


def odd_responses(gold: str | None, other_gold: str | None) -> Iterator[Response]:
    """Long, deep and strange ones. `gold` is the row's right answer, `other_gold` that of a row with another one."""
    nested = r"\frac{1}{" * _NESTED + "1" + "}" * _NESTED
    yield Response("nested LaTeX, 100 kB", rf"The answer is $\boxed{{{nested}}}$", Earns.NOTHING)
    # Digits, commas, brackets and blanks, which patterns for answers stumble over.
    piece = "((1,234.5 + x) = {y}), [-7]    so the answer is not here; "
    yield Response("1 MB of text", piece * (_LONG // len(piece)), Earns.NOTHING)
    if gold is not None and other_gold is not None:
        yield Response("two answers, the last one wrong", f"{gold}\n\n{other_gold}", Earns.LESS_THAN_GOLD)
    right = gold if gold is not None else "42"
    yield Response("answer with a unit", f"{right} apples", Earns.ANYTHING)
    yield Response("lone surrogates", f"\ud83d {right} \udc00", Earns.ANYTHING)
    yield Response("right-to-left text", f"\u202e{_ARABIC} {right}\u202c", Earns.ANYTHING)
    yield Response("full-width digits", right.translate(_FULL_WIDTH), Earns.ANYTHING)
    yield Response("emoji", f"\U0001f469\u200d\U0001f467 {right} \u2705", Earns.ANYTHING)

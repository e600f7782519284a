"""When a response ends: after a stop token, after the token that completes a stop string, or at its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.base import DecodeText, Request, longest_response


@dataclass(frozen=True, slots=True)
class Stopping:
    """The limits of one response."""

    max_tokens: int
    token_ids: frozenset[int]
    strings: tuple[str, ...]
    decode_text: DecodeText | None

    @classmethod
    def of(cls, request: Request, sampling: SamplingParams, context: int | None, decode_text: DecodeText | None) -> Stopping:
        """The request's own limits, and the call's where it has none; never more tokens than fit into `context`."""
        token_ids = sampling.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        strings = sampling.stop if request.stop is None else request.stop
        return cls(longest_response(request, sampling, context), frozenset(token_ids), strings, decode_text)

    def end(self, tokens: Sequence[int], start: int = 0, stop: int | None = None) -> tuple[int, str] | None:
        """The length at which a response ends, and why ("stop" or "length"), if it does with one of its tokens from `start` to `stop`
        (None: the last). Before `start` it went on; what `tokens` has after the end does not matter."""
        stop = len(tokens) if stop is None else stop
        if not self.token_ids and not self.strings:
            return (self.max_tokens, "length") if stop >= self.max_tokens else None
        for length in range(start + 1, stop + 1):
            if tokens[length - 1] in self.token_ids or (self.strings and self._completes_a_string(tokens, length)):
                return length, "stop"
            if length >= self.max_tokens:
                return length, "length"
        return None

    def _completes_a_string(self, tokens: Sequence[int], length: int) -> bool:
        assert self.decode_text is not None
        # A character has at most 4 bytes, and a token at least one of them or is special: earlier tokens cannot matter.
        window = 4 * max(map(len, self.strings)) + 8
        text = self.decode_text(list(tokens[max(0, length - window) : length]))
        return any(string in text for string in self.strings)

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

    def reason(self, last: Sequence[int], length: int) -> str | None:
        """ "stop" or "length" if a response ends with the last of its tokens, None if it goes on. Call it after each token.

        `last` are its last tokens: `window` of them are enough; `length` counts them all.
        """
        if last[-1] in self.token_ids or (self.strings and self._completes_a_string(last)):
            return "stop"
        return "length" if length >= self.max_tokens else None

    def end(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """The length at which a response ends and why, for tokens that may go on after it; None if it goes on after all of them."""
        for length in range(1, len(tokens) + 1):
            reason = self.reason(tokens[max(0, length - self.window) : length], length)
            if reason is not None:
                return length, reason
        return None

    @property
    def window(self) -> int:
        """How many tokens can matter: a character has at most 4 bytes, and a token at least one of them or is special."""
        return 4 * max(map(len, self.strings)) + 8 if self.strings else 1

    def _completes_a_string(self, last: Sequence[int]) -> bool:
        assert self.decode_text is not None
        text = self.decode_text(list(last[-self.window :]))
        return any(string in text for string in self.strings)

"""`lockstep chat MODEL`: talk to a model in the terminal. See docs/generate.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, DataError, as_command
from lockstep.tools.generate import add_sampling_arguments, encode, sampling_of
from lockstep.tools.load_model import LoadedModel, add_model_arguments, load_model_of, names_options
from lockstep.utils.terminal import printable, say

if TYPE_CHECKING:
    from lockstep.workers.rollout.request import Completion
    from lockstep.workers.rollout.stream import Stream

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"
_UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


@as_command
@names_options
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(list(arguments))
    sampling_of(options, ())  # wrong values are said before a model is loaded
    loaded = load_model_of(options)
    if not loaded.tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {options.model} has no chat template; lockstep generate takes texts")
    try:
        with loaded.engine.open(sampling_of(options, loaded.stop_token_ids)) as stream:
            Chat(loaded, stream, options.system).run()
    finally:
        loaded.engine.close()
    return 0


class Chat:
    """One conversation after the other."""

    def __init__(self, loaded: LoadedModel, stream: Stream, system: str | None = None) -> None:
        self._tokenizer = loaded.tokenizer
        self._stream = stream
        self._system = system
        self._num_answers = 0
        self.messages: list[dict[str, str]] = []
        """What was said, without the system's message."""

    def run(self) -> None:
        """Answer the user's lines until there are no more."""
        print(_HELP)
        while True:
            try:
                said = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print(f"\n{_HELP}")
                continue
            if said in ("/exit", "/quit"):
                return
            if said == "/reset":
                self.messages.clear()
                print("(a new conversation)")
            elif said.startswith("/"):
                print(_HELP)
            elif said:
                self.answer(said)

    def answer(self, said: str) -> None:
        """Print the model's answer as it comes. What Ctrl-C stopped stays in the conversation as far as it came; a question without an
        answer does not."""
        import torch

        from lockstep.workers.rollout.request import Request

        self.messages.append({"role": "user", "content": said})
        try:
            (ids,) = encode(self._tokenizer, [self.messages], as_chat=True, system=self._system)
        except DataError as error:
            self.messages.pop()
            say(f"error: {error}", is_error=True)
            return
        self._num_answers += 1
        with _interrupts() as is_interrupted:
            index = self._stream.add(Request(torch.tensor(ids), (0, self._num_answers, 0), streams=True))
            completion = self._print_answer(index, is_interrupted)
        if completion.error is not None:
            self.messages.pop()
            say(f"error: {completion.error}; /reset begins a new conversation", is_error=True)
            return
        text = str(self._tokenizer.decode(completion.ids.tolist(), skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": text})
        notes = {"abort": " (stopped)", "length": " (cut: --max-tokens)"}
        print(notes.get(completion.finish_reason, ""))

    def _print_answer(self, index: int, is_interrupted: Callable[[], bool]) -> Completion:
        from lockstep.workers.rollout.request import Tokens

        ids: list[int] = []
        num_printed = 0
        while True:
            came = self._stream.next()
            if is_interrupted():
                self._stream.abort(index)
            if came is None or came.index != index:
                continue
            ids = ids + came.ids.tolist() if isinstance(came, Tokens) else came.ids.tolist()
            text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
            whole = text.rstrip(_UNFINISHED) if isinstance(came, Tokens) else text
            print(printable(whole[num_printed:]), end="", flush=True)
            num_printed = max(num_printed, len(whole))
            if not isinstance(came, Tokens):
                return came


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is noted, so that no pass is torn apart; a second one is an interrupt as ever."""
    noted: list[int] = []

    def note(signum: int, frame: Any) -> None:
        noted.append(signum)
        if len(noted) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep chat", description=f"Talk to a model. {_HELP}.", allow_abbrev=False)
    add_model_arguments(parser)
    add_sampling_arguments(parser, 0.7)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

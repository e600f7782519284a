"""`lockstep generate MODEL "prompt" ...`: what a model writes, with log-probs on request. See docs/generate.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.sampling import SamplingConfig, SamplingParams, check_line_breaks
from lockstep.errors import ConfigError, DataError, as_command
from lockstep.observability.waiting import shown_work
from lockstep.tools.load_model import LoadedModel, add_model_arguments, load_model_of, names_options
from lockstep.utils.terminal import printable, say

if TYPE_CHECKING:
    from lockstep.workers.rollout.request import Completion

_MAX_TOKENS = 512
_PROMPT_WIDTH = 100
"""Characters of a prompt that stand above its answers."""


@as_command
@names_options
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status: 1 when a prompt has no response."""
    options = _parser().parse_args(list(arguments))
    prompts = [*options.prompt, *(_read_prompts(options.file) if options.file else [])]
    if not prompts:
        raise ConfigError("there is no prompt: give one after the model, or --file FILE")
    if options.n < 1:
        raise ConfigError(f"--n must be at least 1, not {options.n}")
    if options.system and not options.chat and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("--system is a message of a conversation, and a prompt is a text; add --chat, which makes texts messages")
    sampling_of(options, ())  # wrong values are said before a model is loaded
    loaded = load_model_of(options)
    try:
        return _generate(loaded, prompts, options)
    finally:
        loaded.engine.close()


def _generate(loaded: LoadedModel, prompts: Sequence[Any], options: argparse.Namespace) -> int:
    import torch

    from lockstep.workers.rollout.request import Request

    ids = encode(loaded.tokenizer, prompts, options.chat, options.system)
    places = [(i, k) for i in range(len(prompts)) for k in range(options.n)]
    requests = [Request(torch.tensor(ids[i]), (0, i, k)) for i, k in places]
    sampling = sampling_of(options, loaded.stop_token_ids)
    with shown_work("generating"):
        completions = loaded.engine.generate(requests, sampling)
    failed = False
    for (i, k), completion in zip(places, completions, strict=True):
        failed |= completion.error is not None
        if options.json:
            print(json.dumps({"prompt": prompts[i], "sample": k} | _as_dict(loaded.tokenizer, completion, options.log_probs)))
            continue
        if len(places) > 1:
            print(f"--- prompt {i + 1}, sample {k + 1}: {_in_words(prompts[i])}")
        if completion.error is not None:
            say(f"error: {completion.error}", is_error=True)
        elif options.log_probs:
            _print_log_probs(loaded.tokenizer, completion)
        else:
            print(printable(str(loaded.tokenizer.decode(completion.ids.tolist(), skip_special_tokens=True))))
        if len(places) > 1 and completion.error is None:
            print(f"    ({len(completion.ids)} tokens, finish reason: {completion.finish_reason})")
    return int(failed)


def _in_words(prompt: Any) -> str:
    """The beginning of a prompt, or of the last message of a conversation, on one line."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    line = " ".join(text.split())
    return printable(line if len(line) <= _PROMPT_WIDTH else f"{line[: _PROMPT_WIDTH - 3]}...")


def encode(tokenizer: Any, prompts: Sequence[Any], as_chat: bool, system: str | None = None) -> list[list[int]]:
    """Token ids of prompts: a text as it is, or as a user's message with `as_chat`; a list of messages through the chat template.

    Raises ConfigError where a template is needed and there is none, DataError where it refuses a prompt or that has no token.
    """
    from lockstep.data.encoder import PromptEncoder

    found = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and not as_chat:
            found.append(tokenizer(prompt, return_attention_mask=False)["input_ids"])
            if not found[-1]:
                raise DataError(f"prompt {i + 1} has no tokens: {prompt!r}")
            continue
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; leave out --chat and give the prompt as a text")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        first = [{"role": "system", "content": system}] if system else []
        found += PromptEncoder(tokenizer, {}).encode([first + messages], [i + 1])
    return found


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The arguments that `sampling_of` reads."""
    parser.add_argument(
        "--temperature", type=float, default=temperature, help=f"0 takes the likeliest token (default {temperature:g})"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=-1, metavar="K")
    parser.add_argument(
        "--max-tokens", type=int, default=_MAX_TOKENS, metavar="N", help=f"the longest answer (default {_MAX_TOKENS})"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="the answer ends after this text; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")


def sampling_of(options: argparse.Namespace, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How tokens are drawn. Raises ConfigError for a value out of range."""
    check_line_breaks("--stop", options.stop)
    return SamplingConfig(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k).params(
        max_tokens=options.max_tokens,
        stop=options.stop,
        stop_token_ids=stop_token_ids,
        seed=options.seed,
    )


def _read_prompts(path: str) -> list[Any]:
    """The column `prompt` of a parquet, json or jsonl file; the lines of another file, or of standard input (-)."""
    from lockstep.data.encoder import prompt_fault
    from lockstep.data.row_files import RowFiles

    if path.endswith((".parquet", ".json", ".jsonl")):
        files = RowFiles([path])
        if not len(files):
            raise DataError(f"no rows in {path}")
        if "prompt" not in files.columns:
            raise DataError(f"{path} has no column 'prompt': its columns are {sorted(files.columns)}")
        prompts = [row["prompt"] for row in files.rows(range(len(files)))]
        for number, prompt in enumerate(prompts):
            if fault := prompt_fault(prompt):
                raise DataError(f"{files.place(number)}: {fault}")
        return prompts
    try:
        lines = sys.stdin.read() if path == "-" else Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--file {path} cannot be read: {error}") from error
    return [line for line in lines.split("\n") if line.strip()]


def _as_dict(tokenizer: Any, completion: Completion, log_probs: bool) -> dict[str, Any]:
    ids = completion.ids.tolist()
    row = {"response": tokenizer.decode(ids, skip_special_tokens=True), "finish_reason": completion.finish_reason, "token_ids": ids}
    row |= {"error": completion.error} if completion.error is not None else {}
    return row | ({"log_probs": completion.log_probs.tolist()} if log_probs else {})


def _print_log_probs(tokenizer: Any, completion: Completion) -> None:
    """One token per line, after its log-prob."""
    for token, log_prob in zip(completion.ids.tolist(), completion.log_probs.tolist(), strict=True):
        print(f"{log_prob:9.4f}  {printable(repr(tokenizer.decode([token])))}")
    print(f"{completion.log_probs.sum():9.4f}  all {len(completion.ids)} tokens")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep generate", description="Show what a model writes.", allow_abbrev=False)
    add_model_arguments(parser)
    parser.add_argument("prompt", nargs="*", help="texts to go on from")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="prompts: the column 'prompt' of parquet or JSON, or the lines of a text; - for standard input",
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the chat template as a user's message")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="samples of each prompt (default 1)")
    parser.add_argument("--log-probs", action="store_true", help="show each token with its log-prob")
    parser.add_argument("--json", action="store_true", help="one JSON object per sample")
    add_sampling_arguments(parser, 0.0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A model behind an OpenAI endpoint: `/v1/chat/completions`, `/v1/completions`, and for likelihoods completions with `echo`."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from lockstep.errors import ConfigError, ResourceError
from lockstep.tools.evaluate.answering import Answerer, Drawing, cut_at_stop
from lockstep.tools.evaluate.question import Question, Sample

_BUSY = (429, 500, 502, 503, 504)
"""Statuses after which the same request may work."""
_ATTEMPTS = 5
_KEY = "OPENAI_API_KEY"
_LOST = (OSError, http.client.HTTPException)
"""What a connection that ends, at once or in the middle of an answer, raises."""


class Server(Answerer):
    """The model `model` (None: the only one that it lists) at `url`.

    Each request may take `timeout_s` and is made up to five times where the server is busy; `num_at_once` are open at a time. The API key
    is the environment's OPENAI_API_KEY. Raises ResourceError where nothing answers, ConfigError for a model that is not there.
    """

    def __init__(self, url: str, model: str | None, num_at_once: int, timeout_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._num_at_once = num_at_once
        try:
            listed = [entry["id"] for entry in self._call("/v1/models")["data"]]
        except (_Refused, *_LOST, ValueError, LookupError, TypeError) as error:
            raise ResourceError(
                f"{url} does not answer /v1/models as an OpenAI server does: {error}; is lockstep serve running?"
            ) from error
        if model is None and len(listed) != 1:
            raise ConfigError(f"{url} has the models {', '.join(listed)}; choose one with --served-model")
        if model is not None and model not in listed:
            raise ConfigError(f"--served-model {model}: {url} has {', '.join(listed)}")
        self._model = model or listed[0]

    def about(self) -> dict[str, Any]:
        return {"name": self._model, "server": self._url}

    def answer(self, questions: Sequence[Question], drawing: Drawing) -> Iterator[Sample]:
        with ThreadPoolExecutor(self._num_at_once, "eval") as threads:
            asked = [
                threads.submit(self._ask, questions[i], Sample(i, k), drawing)
                for i in range(len(questions))
                for k in range(drawing.n)
            ]
            try:
                for done in as_completed(asked):
                    yield done.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def log_likelihoods(self, questions: Sequence[Question]) -> list[list[float]]:
        pairs = [(str(question.prompt), choice) for question in questions for choice in question.choices]
        with ThreadPoolExecutor(self._num_at_once, "eval") as threads:
            found = iter(list(threads.map(lambda pair: self._log_likelihood(*pair), pairs)))
        return [[next(found) for _ in question.choices] for question in questions]

    def _ask(self, question: Question, sample: Sample, drawing: Drawing) -> Sample:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": drawing.max_tokens,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "seed": drawing.seed + sample.question * drawing.n + sample.number,
        }
        # Names beside OpenAI's own go along only where they say something, since some servers refuse them.
        extra = {
            "top_k": (drawing.top_k, -1),
            "min_p": (drawing.min_p, 0.0),
            "repetition_penalty": (drawing.repetition_penalty, 1.0),
        }
        body |= {name: value for name, (value, default) in extra.items() if value != default}
        body |= {"stop": list(drawing.stop)} if drawing.stop else {}
        try:
            if question.is_plain:
                answer = self._call("/v1/completions", body | {"prompt": question.prompt})
                text = answer["choices"][0]["text"]
            else:
                messages = [{"role": "user", "content": question.prompt}] if isinstance(question.prompt, str) else question.prompt
                answer = self._call("/v1/chat/completions", body | {"messages": messages})
                text = answer["choices"][0]["message"]["content"] or ""
            sample.text = cut_at_stop(text, drawing.stop)
            sample.finish_reason = answer["choices"][0]["finish_reason"]
            sample.num_tokens = (answer.get("usage") or {}).get("completion_tokens")
        except (_Refused, *_LOST, ValueError, LookupError, TypeError) as error:
            sample.finish_reason = "error"
            sample.failure = f"the server gave no answer: {error!r}"
        return sample

    def _log_likelihood(self, context: str, continuation: str) -> float:
        body = {
            "model": self._model,
            "prompt": context + continuation,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
        }
        try:
            said = self._call("/v1/completions", body)["choices"][0]["logprobs"]
            offsets = said["text_offset"]
            numbers = said["token_logprobs"]
            end = len(context) + len(continuation)
            # A token belongs to the continuation that it begins in, the generated one to none.
            return float(sum(number for offset, number in zip(offsets, numbers, strict=True) if len(context) <= offset < end))
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._url} does not give log-probs of the prompt (echo, logprobs, text_offset): {error!r}"
            ) from error
        except (_Refused, *_LOST) as error:
            raise ResourceError(f"{self._url} gave no likelihood: {error}") from error

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url + path, None if body is None else json.dumps(body).encode(), headers)
        for attempt in range(_ATTEMPTS):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                text = error.read(2000).decode(errors="replace")
                if error.code not in _BUSY or attempt == _ATTEMPTS - 1:
                    raise _Refused(f"status {error.code}: {text}") from error
            time.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")


class _Refused(Exception):
    """The server said no."""

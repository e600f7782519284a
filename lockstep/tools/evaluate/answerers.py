"""Who answers: a model that is loaded here, or a model behind an OpenAI endpoint.

A server is asked by `/v1/chat/completions`, `/v1/completions`, and for likelihoods by completions with `echo`.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.sampling import SamplingConfig, SamplingParams
from lockstep.data.encoder import PromptEncoder
from lockstep.errors import ConfigError, ResourceError
from lockstep.tools.evaluate.questions import Question, Sample, digest
from lockstep.trainer.ppo.validation import VALIDATION_STEPS
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.request import Completion, Request

_BUSY = (429, 500, 502, 503, 504)
"""Statuses after which the same request may work."""
_ATTEMPTS = 5
_KEY = "OPENAI_API_KEY"
_LOST = (OSError, http.client.HTTPException)
"""What a connection that ends, at once or in the middle of an answer, raises."""


@dataclass(kw_only=True)
class AnswerSampling(SamplingConfig):
    """How answers are drawn: `n` to each question. Only a loaded model knows the rest of SamplingParams."""

    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot be drawn with."""
        if self.n < 1:
            raise ConfigError(f"--n must be at least 1, not {self.n}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"--n {self.n} at temperature 0 draws the same answer {self.n} times; set --temperature, or --n 1")
        super().__post_init__()
        self.sampling(())

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the same for an engine."""
        return self.params(max_tokens=self.max_tokens, stop_token_ids=stop_token_ids, stop=self.stop, seed=self.seed)


class Answerer(ABC):
    """A model that answers questions."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return what it is, for the result file."""

    @abstractmethod
    def answer(self, questions: Sequence[Question], drawing: AnswerSampling) -> Iterator[Sample]:
        """Yield `drawing.n` samples of each question as they finish. A sample that fails has finish_reason "error" and a failure."""

    @abstractmethod
    def log_likelihoods(self, questions: Sequence[Question]) -> list[list[float]]:
        """Return the log-prob of each choice of each question after its prompt. Raises what makes that impossible."""

    def close(self) -> None:
        """Release what was started."""
        return


class LocalModel(Answerer):
    """A model in this process."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        template_kwargs: dict[str, Any],
        step: int | None = None,
    ) -> None:
        """`step`: the step of a checkpoint; its answers are then the answers of its validation in training."""
        self._name = name
        self._step = step
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._encoder = PromptEncoder(tokenizer, template_kwargs)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def about(self) -> dict[str, Any]:
        template = self._tokenizer.chat_template
        about: dict[str, Any] = {
            "name": self._name,
            "engine": self._engine.config.name,
            "chat_template": digest(template) if template else None,
        }
        if self._step is not None:
            about["step"] = self._step
        return about

    def answer(self, questions: Sequence[Question], drawing: AnswerSampling) -> Iterator[Sample]:
        prompts = [torch.tensor(ids) for ids in self._encode(questions)]
        places = [(i, k) for i in range(len(questions)) for k in range(drawing.n)]
        step = VALIDATION_STEPS + (self._step or 0)
        requests = [Request(prompts[i], (step, questions[i].index, k)) for i, k in places]
        for completion in self._engine.generate_stream(requests, drawing.sampling(self._stop_token_ids)):
            yield self._sample(Sample(*places[completion.index]), completion, drawing.stop)

    def log_likelihoods(self, questions: Sequence[Question]) -> list[list[float]]:
        requests = []
        num_context = []
        for i, (question, prompt) in enumerate(zip(questions, self._encode(questions), strict=True)):
            for k, choice in enumerate(question.choices):
                # Tokenise prompt and choice as one text; the choice begins after the prompt's own tokens.
                whole = self._tokens([str(question.prompt) + choice])[0]
                requests.append(Request(torch.tensor(whole), (0, i, k), max_tokens=1, prompt_log_probs=True))
                num_context.append(len(prompt))
        sums = []
        for completion, start in zip(self._engine.generate(requests, AnswerSampling().sampling(())), num_context, strict=True):
            if completion.error is not None:
                raise ConfigError(f"the likelihood of a choice cannot be computed: {completion.error}")
            if completion.prompt_log_probs is None:
                raise ConfigError(
                    f"--engine {self._engine.config.name} gives no log-probs of prompts, which the task needs; use --engine native"
                )
            sums.append(float(completion.prompt_log_probs[start:].double().sum()))
        found = iter(sums)
        return [[next(found) for _ in question.choices] for question in questions]

    def close(self) -> None:
        self._engine.close()

    def _sample(self, sample: Sample, completion: Completion, stop: tuple[str, ...]) -> Sample:
        sample.finish_reason = completion.finish_reason
        sample.failure = completion.error
        sample.num_tokens = len(completion.ids)
        sample.text = cut_at_stop(self._tokenizer.decode(completion.ids.tolist(), skip_special_tokens=True), stop)
        return sample

    def _encode(self, questions: Sequence[Question]) -> list[list[int]]:
        ids: list[list[int]] = [list(question.prompt_ids or ()) for question in questions]
        for is_plain in (False, True):
            missing = [i for i, question in enumerate(questions) if question.is_plain == is_plain and question.prompt_ids is None]
            prompts = [questions[i].prompt for i in missing]
            encoded = self._tokens(prompts) if is_plain else self._encoder.encode(prompts, missing)
            for i, prompt_ids in zip(missing, encoded, strict=True):
                ids[i] = prompt_ids
        return ids

    def _tokens(self, texts: Sequence[Any]) -> list[list[int]]:
        return self._tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"] if texts else []


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string; an engine gives the tokens of that string too."""
    places = [text.find(string) for string in stop]
    return text[: min((place for place in places if place >= 0), default=len(text))]


# -- a server ----------------------------------------------------------------------------------------------------------------------------


class ServerModel(Answerer):
    """The model `model` (None: the only one that it lists) at `url`.

    Each request may take `timeout_s` and is made up to five times if the server is busy; `num_at_once` are open at a time. The API key is
    the environment's OPENAI_API_KEY. Raises ResourceError if nothing answers, ConfigError for a model that is not there.
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

    def answer(self, questions: Sequence[Question], drawing: AnswerSampling) -> Iterator[Sample]:
        with ThreadPoolExecutor(self._num_at_once, "eval") as threads:
            calls = []
            for i, question in enumerate(questions):
                calls += [threads.submit(self._ask, question, Sample(i, k), drawing) for k in range(drawing.n)]
            try:
                for done in as_completed(calls):
                    yield done.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def log_likelihoods(self, questions: Sequence[Question]) -> list[list[float]]:
        pairs = [(str(question.prompt), choice) for question in questions for choice in question.choices]
        with ThreadPoolExecutor(self._num_at_once, "eval") as threads:
            found = iter(list(threads.map(lambda pair: self._log_likelihood(*pair), pairs)))
        return [[next(found) for _ in question.choices] for question in questions]

    def _ask(self, question: Question, sample: Sample, drawing: AnswerSampling) -> Sample:
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
        if drawing.stop:
            body["stop"] = list(drawing.stop)
        try:
            if question.is_plain:
                answer = self._call("/v1/completions", body | {"prompt": question.prompt})
                text = answer["choices"][0]["text"]
            else:
                messages = question.prompt
                if isinstance(messages, str):
                    messages = [{"role": "user", "content": messages}]
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
            log_probs = self._call("/v1/completions", body)["choices"][0]["logprobs"]
            offsets = log_probs["text_offset"]
            numbers = log_probs["token_logprobs"]
            end = len(context) + len(continuation)
            # A token belongs to the continuation that it begins in, the generated one to none.
            pairs = zip(offsets, numbers, strict=True)
            return float(sum(number for offset, number in pairs if len(context) <= offset < end))
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._url} does not give log-probs of the prompt (echo, logprobs, text_offset): {error!r}"
            ) from error
        except (_Refused, *_LOST) as error:
            raise ResourceError(f"{self._url} gave no likelihood: {error}") from error

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(_KEY)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
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
    """The server refused the request."""

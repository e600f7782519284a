"""Who answers: an interface, and the model that is loaded here. `server.py` has the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.data.encoder import PromptEncoder
from lockstep.errors import ConfigError
from lockstep.tools.evaluate.question import Question, Sample, digest
from lockstep.trainer.ppo.validation import VALIDATION_STEPS
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.request import Completion, Request


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How answers are drawn: as SamplingParams, without what only a loaded model knows."""

    n: int = 1
    """Answers to each question."""
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot be drawn with."""
        if self.n < 1:
            raise ConfigError(f"--n must be at least 1, not {self.n}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"--n {self.n} at temperature 0 draws the same answer {self.n} times; set --temperature, or --n 1")
        self.sampling(())

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """For an engine."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
            seed=self.seed,
        )


class Answerer(ABC):
    """A model that answers questions."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What it is, for the result file."""

    @abstractmethod
    def answer(self, questions: Sequence[Question], drawing: Drawing) -> Iterator[Sample]:
        """`drawing.n` samples of each question, in whatever order they finish. One that fails has finish_reason "error" and a failure."""

    @abstractmethod
    def log_likelihoods(self, questions: Sequence[Question]) -> list[list[float]]:
        """The log-prob of each choice of each question after its prompt. Raises what makes that impossible."""

    def close(self) -> None:
        """End what was started."""
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
        """`step`: of a checkpoint, whose answers are then those of its validation in training."""
        self._name = name
        self._step = step
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._encoder = PromptEncoder(tokenizer, template_kwargs)

    @property
    def has_template(self) -> bool:
        """Whether prompts are conversations for it."""
        return bool(self._tokenizer.chat_template)

    def about(self) -> dict[str, Any]:
        template = self._tokenizer.chat_template
        about = {"name": self._name, "engine": self._engine.config.name, "chat_template": digest(template) if template else None}
        return about | ({"step": self._step} if self._step is not None else {})

    def answer(self, questions: Sequence[Question], drawing: Drawing) -> Iterator[Sample]:
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
                # Cut as one text, so that the tokens are those that such a text has; the prompt ends where its own tokens do.
                whole = self._tokens([str(question.prompt) + choice])[0]
                requests.append(Request(torch.tensor(whole), (0, i, k), max_tokens=1, prompt_log_probs=True))
                num_context.append(len(prompt))
        sums = []
        for completion, start in zip(self._engine.generate(requests, Drawing().sampling(())), num_context, strict=True):
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
            asked = [i for i, question in enumerate(questions) if question.is_plain == is_plain and question.prompt_ids is None]
            prompts = [questions[i].prompt for i in asked]
            for i, encoded in zip(asked, self._tokens(prompts) if is_plain else self._encoder.encode(prompts, asked), strict=True):
                ids[i] = encoded
        return ids

    def _tokens(self, texts: Sequence[Any]) -> list[list[int]]:
        return self._tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"] if texts else []


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string; an engine gives the tokens of that string too."""
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]

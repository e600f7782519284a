"""Requests, answers and errors of the server: OpenAI's forms, and vLLM's additional fields, as pydantic models.

A field that is not known, or that this server cannot honour, is an error: no setting is ignored silently. A field that is null counts as
missing.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, model_validator

MAX_CHOICES = 128
"""Answers to one prompt."""
MAX_PROMPTS = 1024
"""Prompts of one request."""
MAX_MESSAGES = 1 << 14
"""Messages of one conversation."""
MAX_TOP = 20
"""Most likely tokens that can be asked for at a place."""
MAX_STOPS = 64
MIN_TEMPERATURE = 1e-20
"""Beside 0. Logits divided by much less are not finite in float32."""
WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity")
)
"""Fields of OpenAI's that say nothing about the answer here."""
_LARGE = 2**31 - 1
_MAX_SHOWN = 80
"""Characters of a client's value that an error message shows."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 2 * _MAX_SHOWN


# -- errors ------------------------------------------------------------------------------------------------------------------------


class ServeError(Exception):
    """An answer that is an error: HTTP status, and OpenAI's type, code and name of the field."""

    status = 500
    kind = "server_error"
    code: str | None = None
    param: str | None = None
    headers: ClassVar[Mapping[str, str] | None] = None

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(ServeError):
    """The client's mistake."""

    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class WrongKey(BadRequest):
    """The API key is missing or wrong."""

    headers: ClassVar[Mapping[str, str] | None] = {"WWW-Authenticate": "Bearer"}

    def __init__(self) -> None:
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        super().__init__(message, status=401, code="invalid_api_key")


class QueueFull(ServeError):
    """As many requests wait as may wait."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    headers: ClassVar[Mapping[str, str] | None] = {"Retry-After": "1"}


class EngineBroken(ServeError):
    """The engine raised: it answers nothing any more."""

    code = "engine_broken"


class ShuttingDown(EngineBroken):
    """The server ends."""

    status = 503
    code = "shutting_down"


class NoAnswer(ServeError):
    """The engine could not answer one request."""

    code = "no_answer"


class TooLate(ServeError):
    """The request's deadline passed."""

    status = 504
    code = "deadline"


class InternalError(ServeError):
    """A bug of the server."""

    code = "internal"


def parse_json(body: bytes) -> Any:
    """The JSON value of a body. Raises JSONDecodeError, also for what Python cannot hold and for text that cannot be encoded."""
    try:
        text = body.decode()
        value = json.loads(text)
        if "\\u" in text:  # half a character (a lone surrogate) is JSON, but no text that can be tokenised or sent back
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    return value


def invalid_body(errors: Iterable[Mapping[str, Any]]) -> BadRequest:
    """The first of pydantic's errors about a body, in our words; each location starts with "body"."""
    error = next(iter(errors))
    if error["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {error['ctx']['error']}", code="invalid_json")
    place = error["loc"][1:]
    if not place:
        return BadRequest("the body is not a JSON object; send one with Content-Type: application/json", code="invalid_json")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    param = f"{place[0]}[{place[1]}]" if place[0] == "messages" and len(place) > 1 else str(place[0])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        return BadRequest(f"{path} is missing", param)
    return BadRequest(f"{path}={shortened(error['input'])}: {message}", param)


def shortened(value: Any) -> str:
    """The beginning of a value that a client sent, for an error message."""
    text = _REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# -- requests ----------------------------------------------------------------------------------------------------------------------


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _read_prompts(value: Any) -> Any:
    """A string, token ids, or a list of either, as a list. Raises ValueError."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string, token ids, or a list of them that is not empty")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts; expected at most {MAX_PROMPTS}")
    for index, entry in enumerate(value):
        if not isinstance(entry, str) and not _is_ids(entry):
            raise ValueError(f"entry {index} is neither a string nor a list of token ids")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _joined_parts(value: Any) -> Any:
    """Content in parts becomes one text, since the model reads text alone."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('a part is not {"type": "text", "text": ...}; the model reads text alone')
    return "".join(part["text"] for part in value)


def _check_length(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:  # said before the messages are read
        raise ValueError(f"{len(value)} messages; expected at most {MAX_MESSAGES}")
    return value


def _check_temperature(value: float) -> float:
    if 0.0 < value < MIN_TEMPERATURE:
        raise ValueError(f"expected 0 (the likeliest tokens), or {MIN_TEMPERATURE:g} to 100")
    return value


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation. The chat template also sees fields that are not listed here."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[TextPart] | None)] = ""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    """The last event counts the tokens."""
    include_obfuscation: bool | None = None
    """Without effect."""


TokenIds = list[int]
Prompt = str | TokenIds
Prompts = Annotated[list[Prompt], PlainValidator(_read_prompts, json_schema_input_type=str | TokenIds | list[str] | list[TokenIds])]
Messages = Annotated[
    list[ChatMessage], FailFast(), Field(min_length=1), BeforeValidator(_check_length, json_schema_input_type=list[ChatMessage])
]
Tools = Annotated[list[dict[str, Any]], FailFast()]
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
Temperature = Annotated[float, Field(ge=0.0, le=100.0), AfterValidator(_check_temperature)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class Body(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    UNSUPPORTED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    """Fields whose other values would change the answer in a way that is not implemented: the values that are accepted, and why."""

    model: str | None = None
    """The model's name, as /v1/models lists it."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        """Leave out fields that are null or without effect. Raises BadRequest for the first field that is not known or not supported."""
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None and name not in WITHOUT_EFFECT}
        for name, (accepted, why) in cls.UNSUPPORTED.items():
            if name in given and given[name] not in accepted:
                raise BadRequest(f"{name}={shortened(given[name])} is not supported: {why}", name, code="unsupported_parameter")
        for name in given.keys() - cls.model_fields.keys():
            if name not in cls.UNSUPPORTED:
                raise BadRequest(
                    f"the field {shortened(name)} is not known here; leave it out", name[:_MAX_SHOWN], code="unknown_parameter"
                )
            del given[name]
        return given


class ConversationFields(BaseModel):
    """What goes through the chat template beside the messages."""

    tools: Tools = []
    tool_choice: str = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True

    TEMPLATE_OWN: ClassVar[frozenset[str]] = frozenset(
        ("tokenize", "chat_template", "conversation", "messages", "tools", "return_tensors", "return_dict", "padding", "truncation")
    )

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template shows."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the template. The template itself is the model's, and so is what is done with its text."""
        return {"add_generation_prompt": self.add_generation_prompt} | self.chat_template_kwargs

    @model_validator(mode="after")
    def _check_template_kwargs(self) -> ConversationFields:
        taken = sorted(self.TEMPLATE_OWN & self.chat_template_kwargs.keys())
        if taken:
            raise BadRequest(f"chat_template_kwargs has {taken[0]}, which is the server's to set", "chat_template_kwargs")
        return self


_TOOL_CHOICE = (("auto", "none"), "the model chooses, or there are no tools")


class GenerationRequest(Body):
    """What requests for answers have in common."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, ge=1e-6, le=1.0)
    top_k: int = Field(-1, ge=-1, le=_LARGE)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: StopStrings = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    """The model's own end tokens end nothing."""
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the last event of a stream counts the tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream=true", "stream_options")
        return self


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "suffix": (("",), "the model only continues a text"),
        "logit_bias": (({},), "the logits are the trainer's"),
    }

    prompt: Prompts
    max_tokens: int = Field(16, ge=0, le=_LARGE)
    echo: bool = False
    """The text starts with the prompt, and so do the log-probs."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool = True

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return len(self.prompt) * self.n

    @property
    def num_top(self) -> int | None:
        """How many of the most likely tokens are shown with their log-probs; None: no log-probs."""
        return self.logprobs

    @property
    def max_generated(self) -> int | None:
        """The longest answer; None: as long as the context allows."""
        return self.max_tokens

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.best_of not in (None, 1, self.n):
            raise BadRequest(
                f"best_of={self.best_of} is not supported: all answers are returned; ask for n of them",
                "best_of",
                code="unsupported_parameter",
            )
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens=0 asks for nothing; it is for echo=true", "max_tokens")
        if self.stream and self.echo and self.logprobs is not None:
            raise BadRequest("log-probs of the prompt are not streamed; leave out stream, echo or logprobs", "stream")
        return self


class ChatRequest(ConversationFields, GenerationRequest):
    """The body of /v1/chat/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "logit_bias": (({},), "the logits are the trainer's"),
        "response_format": (({"type": "text"},), "answers are free text"),
        "modalities": ((["text"],), "the model reads and writes text"),
        "functions": (([],), "name them as tools"),
        "function_call": (("none",), "name functions as tools"),
        "parallel_tool_calls": ((True,), "what the model calls is text of its answer, and not limited"),
        "tool_choice": _TOOL_CHOICE,
    }

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=_LARGE)
    max_tokens: int | None = Field(None, ge=1, le=_LARGE)
    """The older name of max_completion_tokens."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)

    @property
    def echo(self) -> bool:
        """An answer to a conversation never starts with it."""
        return False

    @property
    def num_answers(self) -> int:
        """See CompletionRequest."""
        return self.n

    @property
    def num_top(self) -> int | None:
        """See CompletionRequest."""
        return self.top_logprobs if self.logprobs else None

    @property
    def max_generated(self) -> int | None:
        """See CompletionRequest."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_log_probs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
        return self


class TokenizeRequest(ConversationFields, Body):
    """The body of /tokenize: a text, or a conversation that goes through the chat template."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {"tool_choice": _TOOL_CHOICE}

    prompt: str = ""
    messages: Messages = []
    add_special_tokens: bool | None = None
    """Default: for a text, not for a conversation."""

    @property
    def is_conversation(self) -> bool:
        """Whether there are messages instead of a text."""
        return bool(self.messages)

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if ("prompt" in self.model_fields_set) == self.is_conversation:
            raise BadRequest("expected one of prompt (a string) and messages (a conversation)", "prompt")
        return self


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: Annotated[list[int], FailFast()] = []


# -- answers -----------------------------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    """The tokens that were read and written; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogProbs(BaseModel):
    """Log-probs in the form of /v1/completions: lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None where there is none: the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TokenLogProb(BaseModel):
    """A token with its log-prob."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogProb(TokenLogProb):
    """A token of an answer, and the most likely tokens at its place."""

    top_logprobs: list[TokenLogProb]


class ChatLogProbs(BaseModel):
    """Log-probs in the form of /v1/chat/completions."""

    content: list[ChatTokenLogProb]
    refusal: None = None


class Choice(BaseModel):
    """What every form of an answer, or of a piece of one, has."""

    index: int
    finish_reason: str | None


class TextChoice(Choice):
    """An answer of /v1/completions, or a piece of one."""

    text: str
    logprobs: TextLogProbs | None


class AnswerMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    """An answer of /v1/chat/completions."""

    message: AnswerMessage
    logprobs: ChatLogProbs | None


class Delta(BaseModel):
    """What a piece adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatPiece(Choice):
    """A piece of an answer of /v1/chat/completions."""

    delta: Delta
    logprobs: ChatLogProbs | None


class Answer(BaseModel):
    """What every answer, and every event of a stream, has. Fields that are not set are not sent."""

    id: str
    created: int
    model: str
    usage: Usage | None = None


class TextCompletion(Answer):
    """The answer of /v1/completions, or an event of its stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Answer):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """Where its files are."""
    max_model_len: int | None
    step: int | None
    """Of a checkpoint: its step."""


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class Text(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client needs to prepare prompts as text."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: Any


class ErrorDetail(BaseModel):
    """An error: what is wrong, and which field it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error in OpenAI's form."""

    error: ErrorDetail

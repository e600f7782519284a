"""What a client asks for: the bodies of /v1/completions, /v1/chat/completions and /tokenize as records. Without torch, without a tokenizer.

Beside OpenAI's fields: top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, skip_special_tokens, add_special_tokens,
chat_template_kwargs, with the meaning that vLLM's server gives them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.tools.serve.fields import BadRequest, Fields, is_integer

MOST_CHOICES = 128
"""Answers to one prompt."""
MOST_PROMPTS = 1024
"""Prompts of one request."""
MOST_TOP = 20
"""Most likely tokens that can be asked for at a place."""
MOST_STOPS = 64
LEAST_TEMPERATURE = 1e-20
"""Beside 0. Logits divided by much less are not finite in float32."""
_LARGE = 2**31 - 1

GivenPrompt = str | list[int]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the tokens of an answer are drawn, and when it ends."""

    temperature: float
    top_p: float
    top_k: int
    """-1: all."""
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int | None
    """None: as many as the context holds."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    """The model's own end tokens end nothing."""
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request for answers."""

    model: str | None
    prompts: list[GivenPrompt]
    """Texts or token ids; empty where there are `messages`."""
    messages: list[dict[str, Any]] | None
    """A conversation, for the model's chat template."""
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    drawing: Drawing
    n: int
    """Answers to each prompt."""
    echo: bool
    """The text starts with the prompt, and so do the log-probs."""
    top_log_probs: int | None
    """Log-probs of each token, and of so many most likely ones; None: no log-probs."""
    stream: bool
    include_usage: bool
    """A last event of a stream counts the tokens."""
    skip_special_tokens: bool
    add_special_tokens: bool

    @property
    def is_chat(self) -> bool:
        """Whether it is answered in the form of /v1/chat/completions."""
        return self.messages is not None


def read_completion(body: bytes) -> Call:
    """The body of /v1/completions. Raises BadRequest."""
    fields = Fields(body)
    prompts = read_prompts(fields.get("prompt"))
    for name, allowed, why in (
        ("suffix", ("",), "the model only continues a text"),
        ("best_of", (1, fields.get("n")), "all answers are returned; ask for n of them"),
        ("logit_bias", ({},), "the logits are the trainer's"),
    ):
        fields.only(name, allowed, why)
    call = Call(
        model=fields.text("model"),
        prompts=prompts,
        messages=None,
        tools=None,
        template_kwargs={},
        drawing=_drawing(fields, fields.integer("max_tokens", 0, _LARGE, 16)),
        n=_n(fields),
        echo=fields.flag("echo"),
        top_log_probs=fields.integer("logprobs", 0, MOST_TOP),
        **_form(fields),
        add_special_tokens=fields.flag("add_special_tokens", True),
    )
    fields.finish()
    if call.drawing.max_tokens == 0 and not call.echo:
        raise BadRequest("max_tokens=0 asks for nothing; it is for echo=true", "max_tokens")
    if call.stream and call.echo and call.top_log_probs is not None:
        raise BadRequest("log-probs of the prompt are not streamed; leave out stream, echo or logprobs", "stream")
    return call


def read_chat(body: bytes) -> Call:
    """The body of /v1/chat/completions. Raises BadRequest."""
    fields = Fields(body)
    messages = read_messages(fields.get("messages"))
    tools = _tools(fields)
    for name, allowed, why in (
        ("logit_bias", ({},), "the logits are the trainer's"),
        ("response_format", ({"type": "text"},), "answers are free text"),
        ("modalities", (["text"],), "the model reads and writes text"),
        ("functions", ([],), "name them as tools"),
        ("function_call", ("none",), "name functions as tools"),
        ("parallel_tool_calls", (True,), "what the model calls is text of its answer, and not limited"),
    ):
        fields.only(name, allowed, why)
    wants_log_probs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MOST_TOP, 0)
    if top and not wants_log_probs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    most, older = fields.integer("max_completion_tokens", 1, _LARGE), fields.integer("max_tokens", 1, _LARGE)
    call = Call(
        model=fields.text("model"),
        prompts=[],
        messages=messages,
        tools=tools,
        template_kwargs=_template_kwargs(fields),
        drawing=_drawing(fields, older if most is None else most),
        n=_n(fields),
        echo=False,
        top_log_probs=top if wants_log_probs else None,
        **_form(fields),
        add_special_tokens=False,
    )
    fields.finish()
    return call


@dataclass(frozen=True, kw_only=True)
class TokenizeCall:
    """A request for token ids, of a text or of a conversation through the chat template."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    add_special_tokens: bool


def read_tokenize(body: bytes) -> TokenizeCall:
    """The body of /tokenize. Raises BadRequest."""
    fields = Fields(body)
    prompt, messages = fields.text("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("expected one of prompt (a string) and messages (a conversation)", "prompt")
    call = TokenizeCall(
        model=fields.text("model"),
        prompt=prompt,
        messages=None if messages is None else read_messages(messages),
        tools=_tools(fields),
        template_kwargs=_template_kwargs(fields),
        add_special_tokens=fields.flag("add_special_tokens", messages is None),
    )
    fields.finish()
    return call


def read_prompts(value: Any) -> list[GivenPrompt]:
    """A string, token ids, or a list of either, as a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(is_integer, value))):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest("prompt is missing or empty; expected a string, token ids, or a list of them", "prompt")
    if len(value) > MOST_PROMPTS:
        raise BadRequest(f"prompt has {len(value)} entries; expected at most {MOST_PROMPTS}", "prompt")
    for index, entry in enumerate(value):
        if not isinstance(entry, str) and not (isinstance(entry, list) and entry and all(map(is_integer, entry))):
            raise BadRequest(f"prompt[{index}] is neither a string nor a list of token ids", "prompt")
    return value


def read_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation; content in parts becomes one text, since the model reads text alone."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages is missing or empty; expected a list of {role, content}", "messages")
    messages = []
    for index, message in enumerate(value):
        place = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{place} has no role; expected an object with role and content", place)
        content = message.get("content")
        if isinstance(content, list):
            content = _joined(content, place)
        if content is not None and not isinstance(content, str):
            raise BadRequest(f"{place}.content is neither a string nor a list of parts", place)
        messages.append(message | {"content": "" if content is None else content})
    return messages


def _joined(parts: Sequence[Any], place: str) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{place}.content has a part that is not text; the model reads text alone", place)
    return "".join(part["text"] for part in parts)


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRequest("tools is not a list of objects", "tools")
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            "tool_choice is not supported: the model chooses, or there are none", "tool_choice", code="unsupported_parameter"
        )
    return tools if tools and choice != "none" else None


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    """What the template is given. The template itself is the model's, and so is what is done with its text."""
    kwargs = {"add_generation_prompt": fields.flag("add_generation_prompt", True)} | fields.mapping("chat_template_kwargs")
    own = {
        "tokenize",
        "chat_template",
        "conversation",
        "messages",
        "tools",
        "return_tensors",
        "return_dict",
        "padding",
        "truncation",
    }
    taken = sorted(own & kwargs.keys())
    if taken:
        raise BadRequest(f"chat_template_kwargs has {taken[0]}, which is the server's to set", "chat_template_kwargs")
    return kwargs


def _drawing(fields: Fields, max_tokens: int | None) -> Drawing:
    top_k = fields.integer("top_k", -1, _LARGE, -1)
    assert top_k is not None
    return Drawing(
        temperature=_temperature(fields),
        top_p=fields.number("top_p", 1e-6, 1.0, 1.0),
        top_k=top_k or -1,
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100.0, 1.0),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        max_tokens=max_tokens,
        stop=fields.strings("stop", MOST_STOPS),
        stop_token_ids=fields.integers("stop_token_ids", MOST_STOPS),
        ignore_eos=fields.flag("ignore_eos"),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
    )


def _temperature(fields: Fields) -> float:
    temperature = fields.number("temperature", 0.0, 100.0, 1.0)
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise BadRequest(
            f"temperature={temperature} is out of range; expected 0 (the likeliest tokens), or {LEAST_TEMPERATURE:g} to 100",
            "temperature",
        )
    return temperature


def _n(fields: Fields) -> int:
    n = fields.integer("n", 1, MOST_CHOICES, 1)
    assert n is not None
    return n


def _form(fields: Fields) -> dict[str, Any]:
    """In which form the answer comes."""
    stream, options = fields.flag("stream"), fields.mapping("stream_options")
    if options and not stream:
        raise BadRequest("stream_options needs stream=true", "stream_options")
    if not options.keys() <= {"include_usage", "include_obfuscation"}:
        raise BadRequest("stream_options knows include_usage alone", "stream_options")
    return {
        "stream": stream,
        "include_usage": options.get("include_usage") is True,
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
    }

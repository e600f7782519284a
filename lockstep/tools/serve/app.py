"""The FastAPI application: the paths of the server, and how requests for answers are computed."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from lockstep.config.sampling import SamplingConfig, SamplingParams
from lockstep.errors import ConfigError, LockstepError
from lockstep.tools.serve import schema
from lockstep.tools.serve.answers import Answers, error_event
from lockstep.tools.serve.limits import Limits, RequestLimits, error_response, too_late
from lockstep.tools.serve.metrics import Metrics
from lockstep.tools.serve.queue import QueuedCall, RequestQueue
from lockstep.tools.serve.schema import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    EngineBroken,
    InternalError,
    NoAnswer,
    ServeError,
)
from lockstep.tools.serve.text import PromptReader, Vocabulary
from lockstep.workers.rollout.request import Completion
from lockstep.workers.rollout.request import Request as EngineRequest

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from lockstep.tools.load_model import LoadedModel
    from lockstep.tools.serve.queue import NewerWeights
    from lockstep.workers.rollout.stream import Stream

_Found = TypeVar("_Found")
_LONG_BODY = 1 << 16
"""Bytes from which on a request's prompts are read in a thread of their own, so that they hold up no shorter ones."""
_MAX_IDS = 1 << 16
"""Ids that /detokenize takes, or as many as the context holds."""
_MAX_TEXT = 1 << 20
"""Characters that /tokenize takes, or as many as the context may hold."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server allows."""

    name: str
    """The model's name for clients."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    max_queue: int = 1024
    """Requests that may wait, beside the `max_num_seqs` that run."""
    num_tokens: int | None = None
    """Tokens that the key-value cache should hold; None: what memory allows."""
    newer: Callable[[LoadedModel], NewerWeights | None] | None = None
    """Looks for newer weights, every `follow_s`."""
    follow_s: float = 10.0


class Server:
    """One model behind HTTP. `app` is the ASGI application; the engine runs while its lifespan does."""

    queue: RequestQueue

    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self.loaded = loaded
        self.options = options
        self.metrics = Metrics()
        engine = loaded.engine
        # The engine's thread, those that read prompts and the event loop each have a tokenizer of their own: one is not safe in several.
        self.reader = PromptReader(copy.deepcopy(loaded.tokenizer), engine.vocabulary, engine.context)
        self.long_reader = PromptReader(copy.deepcopy(loaded.tokenizer), engine.vocabulary, engine.context)
        self.vocabulary = Vocabulary(copy.deepcopy(loaded.tokenizer))
        self._threads = {reader: ThreadPoolExecutor(1, "reader") for reader in (self.reader, self.long_reader)}
        self._created = int(time.time())
        self.app = make_app(self)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The engine's thread runs inside."""
        self.queue = RequestQueue(self._open_stream, self.loaded.engine.seats + self.options.max_queue)
        following = asyncio.ensure_future(self._follow()) if self.options.newer is not None else None
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
            await self.queue.close()
            for thread in self._threads.values():
                thread.shutdown(wait=False, cancel_futures=True)

    def give_up(self) -> None:
        """Answer all waiting clients with an error, now: the server ends. On the event loop."""
        self.queue.give_up()

    def _open_stream(self) -> Stream:
        """A stream of the engine. Every request has sampling parameters of its own, so the stream's are never used."""
        default = SamplingParams(temperature=1.0, max_tokens=1, stop_token_ids=self.loaded.stop_token_ids, seed=0)
        return self.loaded.engine.open(default, num_tokens=self.options.num_tokens)

    async def _follow(self) -> None:
        """Change to newer weights whenever there are any."""
        assert self.options.newer is not None
        while True:
            await asyncio.sleep(self.options.follow_s)
            try:
                newer = await asyncio.to_thread(self.options.newer, self.loaded)
            except Exception as error:
                # A checkpoint may be deleted while it is read, which readers report in many ways: the next one comes.
                why = error if isinstance(error, LockstepError) else repr(error)
                print(f"warning: the newest checkpoint could not be loaded, the one before goes on: {why}", flush=True)
                continue
            if newer is not None:
                try:
                    await self.queue.change(newer.put)
                except EngineBroken:
                    return  # requests are told so, and so is /health
                self.loaded = replace(self.loaded, source=newer.source)
                print(f"serving {self.options.name} of step {newer.source.step}", flush=True)

    # -- requests for answers --------------------------------------------------------------------------------------------------------

    async def generate(self, call: CompletionRequest | ChatRequest, request: Request) -> Any:
        """The answer to a call: a model of `schema`, or a stream of events."""
        self.check_model(call.model)
        async with self.deadline(request):
            with self.place(call.num_answers) as queued:
                prompts = await unless_gone(request, self._read_prompts(call, await self.reader_of(request)))
                requests = engine_requests(call, prompts, self.loaded.stop_token_ids, self.reader.context)
                await unless_gone(request, queued.submit(requests))
                answers = Answers(call, prompts, self.options.name, self.vocabulary)
                self.metrics.num_prompt_tokens += sum(map(len, prompts))
                if call.stream:
                    return _Events(queued, self._events(queued, answers, request))
                completions = await unless_gone(request, self._collect(queued))
                queued.close()
        choices = []
        for place, completion in enumerate(completions):
            choices.append(answers.choice(place, completion))
            await asyncio.sleep(0)  # many log-probs take long, and other requests wait
        self._count(answers, request)
        return answers.whole(choices)

    async def _read_prompts(self, call: CompletionRequest | ChatRequest, reader: PromptReader) -> list[list[int]]:
        """The ids of each prompt. Prompts of other calls are read in between, and none for which no client waits any more."""
        prompts: Sequence[str | list[int]]
        if isinstance(call, ChatRequest):
            prompts = [await self._render(reader, call)]
            add_special_tokens = False
        else:
            prompts = call.prompt
            add_special_tokens = call.add_special_tokens
        found = []
        for number, prompt in enumerate(prompts):
            name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            found.append(await self.in_thread(reader, reader.read, name, prompt, add_special_tokens))
        return found

    async def _render(self, reader: PromptReader, call: ChatRequest | schema.TokenizeRequest) -> str:
        def render() -> str:
            messages = [message.model_dump() for message in call.messages]
            return reader.render(messages, call.offered_tools, call.template_kwargs)

        text: str = await self.in_thread(reader, render)
        return text

    async def _collect(self, queued: QueuedCall) -> list[Completion]:
        """The completions in the order of the call."""
        found: dict[int, Completion] = {}
        while len(found) < queued.size:
            place, answer = await queued.next()
            if isinstance(answer, Completion):
                found[place] = self._checked(answer)
        return [found[place] for place in range(queued.size)]

    async def _events(self, queued: QueuedCall, answers: Answers, request: Request) -> AsyncIterator[bytes]:
        """The answers as they come. An error is the last event: the status has been sent."""
        for event in answers.begin():
            yield event
        is_first = True
        num_left = queued.size
        try:
            while num_left:
                async with self.deadline(request):
                    place, answer = await queued.next()
                if is_first:
                    self.metrics.first_token_s.add(self._elapsed(request))
                    is_first = False
                if isinstance(answer, Completion):
                    num_left -= 1
                    events = answers.end(place, self._checked(answer))
                else:
                    events = answers.tokens(place, answer)
                for event in events:
                    yield event
        except ServeError as error:
            yield error_event(error.body())
            return
        except Exception as error:
            traceback.print_exception(error)
            yield error_event(_internal_error(error).body())
            return
        for event in answers.finish():
            yield event
        self._count(answers, request)

    def _checked(self, completion: Completion) -> Completion:
        self.metrics.finished[completion.finish_reason] += 1
        if completion.finish_reason == "error":
            raise NoAnswer(str(completion.error))
        return completion

    def _count(self, answers: Answers, request: Request) -> None:
        self.metrics.num_generated_tokens += answers.num_generated
        self.metrics.request_s.add(self._elapsed(request))

    def _elapsed(self, request: Request) -> float:
        return asyncio.get_running_loop().time() - request.state.deadline + self.options.limits.timeout_s

    # -- what requests share ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def deadline(self, request: Request) -> AsyncIterator[None]:
        """Raises TooLate at the request's deadline."""
        try:
            async with asyncio.timeout_at(request.state.deadline):
                yield
        except TimeoutError as error:
            raise too_late(self.options.limits.timeout_s) from error

    @contextmanager
    def place(self, count: int) -> Iterator[QueuedCall]:
        """A place in the queue, which is given back when what is inside raises. Raises BadRequest, QueueFull, EngineBroken."""
        if count > self.queue.max_open:
            raise BadRequest(f"the call asks for {count} answers; this server computes at most {self.queue.max_open}", "n")
        queued = self.queue.admit(count)
        try:
            yield queued
        except BaseException:
            queued.close()
            raise

    async def reader_of(self, request: Request) -> PromptReader:
        """Which of the two reads the request's prompts."""
        return self.reader if len(await request.body()) < _LONG_BODY else self.long_reader

    async def in_thread(self, reader: PromptReader, function: Callable[..., Any], *arguments: Any) -> Any:
        """In the reader's thread: a long text would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[reader], function, *arguments)

    def check_model(self, name: str | None) -> None:
        """Raise BadRequest for a name that is not the served model's."""
        if name not in (None, "", self.options.name):
            message = f"the model {schema.shortened(name)} is not served here; this server has {self.options.name!r}"
            raise BadRequest(message, "model", 404, "model_not_found")

    # -- other requests --------------------------------------------------------------------------------------------------------------

    async def tokenize(self, call: schema.TokenizeRequest, request: Request) -> schema.Tokens:
        """The ids of a text or a conversation."""
        self.check_model(call.model)
        reader = await self.reader_of(request)
        async with self.deadline(request):
            with self.place(1) as queued:
                ids = await unless_gone(request, self._tokenize(call, reader))
                queued.close()
        return schema.Tokens(count=len(ids), max_model_len=reader.context, tokens=ids)

    async def _tokenize(self, call: schema.TokenizeRequest, reader: PromptReader) -> list[int]:
        text = await self._render(reader, call) if call.is_conversation else call.prompt
        max_characters = max(_MAX_TEXT, reader.max_characters or 0)
        if len(text) > max_characters:
            raise BadRequest(f"the text has {len(text)} characters; expected at most {max_characters}: send it in parts", "prompt")
        add_special_tokens = not call.is_conversation if call.add_special_tokens is None else call.add_special_tokens
        ids: list[int] = await self.in_thread(reader, reader.encode, text, add_special_tokens)
        return ids

    async def detokenize(self, call: schema.DetokenizeRequest, request: Request) -> schema.Text:
        """The text of token ids."""
        self.check_model(call.model)
        reader = await self.reader_of(request)
        max_ids = max(_MAX_IDS, reader.context or 0)
        if len(call.tokens) > max_ids:
            raise BadRequest(f"tokens has {len(call.tokens)} ids; expected at most {max_ids}: send them in parts", "tokens")
        if not all(0 <= token < self.loaded.engine.vocabulary for token in call.tokens):
            raise BadRequest(f"tokens has an id that is not one of 0 to {self.loaded.engine.vocabulary - 1}", "tokens")
        async with self.deadline(request):
            with self.place(1) as queued:
                text = await unless_gone(request, self.in_thread(reader, reader.decode, call.tokens))
                queued.close()
        return schema.Text(prompt=text)

    def model_card(self) -> schema.ModelCard:
        """The model that is served."""
        source = self.loaded.source
        return schema.ModelCard(
            id=self.options.name,
            object="model",
            created=self._created,
            owned_by="lockstep",
            root=source.path,
            max_model_len=self.reader.context,
            step=source.step,
        )

    def tokenizer_info(self) -> schema.TokenizerInfo:
        """What a client needs to prepare prompts as text."""
        tokenizer = self.vocabulary.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return schema.TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__, **{name: getattr(tokenizer, name, None) for name in names}
        )

    def metrics_text(self) -> str:
        """Counts, times and the state of the queue, for Prometheus."""
        stream = self.queue.stream
        gauges = {
            "requests_open": self.queue.num_open,
            "requests_running": stream.num_running,
            "requests_waiting": stream.num_waiting,
            "cache_pages": stream.num_pages,
            "cache_pages_free": stream.num_free_pages,
            "cache_pages_kept": stream.num_kept_pages,
            "engine_up": self.queue.error is None,
        }
        return self.metrics.text(gauges)


class _Events(StreamingResponse):
    """Server-sent events. However the stream ends, also before its first event, the call is closed."""

    def __init__(self, queued: QueuedCall, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._queued = queued

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._queued.close()


def engine_requests(
    call: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], stop_token_ids: tuple[int, ...], context: int | None
) -> list[EngineRequest]:
    """A request for each answer: those to the first prompt first. Raises BadRequest for parameters that cannot be sampled with.

    With a seed, what is drawn depends on it, the place in the call and the prompt alone.
    """
    longest = context or max(map(len, prompts)) + 4096
    own_stops = () if call.ignore_eos else stop_token_ids
    seed = secrets.randbits(63) if call.seed is None else call.seed & (2**63 - 1)
    try:
        drawn = SamplingConfig(
            temperature=call.temperature,
            top_k=call.top_k or -1,
            top_p=call.top_p,
            min_p=call.min_p,
            repetition_penalty=call.repetition_penalty,
        )
        params = drawn.params(
            presence_penalty=call.presence_penalty,
            frequency_penalty=call.frequency_penalty,
            max_tokens=max(1, longest if call.max_generated is None else call.max_generated),
            stop_token_ids=(*own_stops, *call.stop_token_ids),
            stop=tuple(dict.fromkeys(call.stop)),
            seed=seed,
        )
    except ConfigError as error:
        raise BadRequest(str(error)) from error
    return [
        EngineRequest(
            torch.tensor(ids, dtype=torch.int64),
            (0, number, sample),
            sampling=params,
            streams=call.stream,
            top_log_probs=call.num_top or 0,
            prompt_log_probs=call.echo and call.num_top is not None,
        )
        for number, ids in enumerate(prompts)
        for sample in range(call.n)
    ]


async def unless_gone(request: Request, answer: Awaitable[_Found]) -> _Found:
    """The answer. Raises ClientDisconnect when the client goes away first; the body must have been read."""
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- the application ---------------------------------------------------------------------------------------------------------------


def _internal_error(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__} inside the server; its log has the traceback")


class _JsonRequest(Request):
    async def json(self) -> Any:
        return schema.parse_json(await self.body())


class _JsonRoute(APIRoute):
    """A route that reads bodies by `schema.parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            response: Response = await handle(_JsonRequest(request.scope, request.receive))
            return response

        return handle_json


def make_app(server: Server) -> FastAPI:
    """The paths of the server."""
    app = FastAPI(
        title="lockstep serve",
        description="OpenAI's HTTP interface over one model.",
        lifespan=server.lifespan,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        responses={"default": {"model": schema.ErrorAnswer, "description": "An error"}},
    )
    app.router.route_class = _JsonRoute

    @app.post("/v1/completions", response_model=schema.TextCompletion, response_model_exclude_unset=True)
    async def completions(call: CompletionRequest, request: Request) -> Any:
        """Continue prompts, given as text or token ids."""
        return await server.generate(call, request)

    @app.post("/v1/chat/completions", response_model=schema.ChatCompletion, response_model_exclude_unset=True)
    async def chat(call: ChatRequest, request: Request) -> Any:
        """Answer a conversation."""
        return await server.generate(call, request)

    @app.get("/v1/models")
    async def models() -> schema.ModelList:
        """The model that is served."""
        return schema.ModelList(object="list", data=[server.model_card()])

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> schema.ModelCard:
        """The model that is served, by its name."""
        server.check_model(model)
        return server.model_card()

    @app.post("/tokenize")
    async def tokenize(call: schema.TokenizeRequest, request: Request) -> schema.Tokens:
        """The token ids of a text or a conversation."""
        return await server.tokenize(call, request)

    @app.post("/detokenize")
    async def detokenize(call: schema.DetokenizeRequest, request: Request) -> schema.Text:
        """The text of token ids."""
        return await server.detokenize(call, request)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> schema.TokenizerInfo:
        """What a client needs to prepare prompts as text."""
        return server.tokenizer_info()

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the engine works."""
        error = server.queue.error
        if error is not None:
            return JSONResponse({"status": "broken", "reason": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counts, times and the state of the queue, for Prometheus."""
        return PlainTextResponse(server.metrics_text(), media_type="text/plain; version=0.0.4")

    _add_error_handlers(app)
    paths = [route.path for route in app.routes if hasattr(route, "path")]
    app.add_middleware(Limits, limits=server.options.limits, metrics=server.metrics, paths=paths)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """All errors are in OpenAI's form."""

    @app.exception_handler(ServeError)
    async def serve_error(request: Request, error: ServeError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(schema.invalid_body(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(BadRequest(str(error.detail), status=error.status_code))

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> JSONResponse:
        return error_response(_internal_error(error))  # the HTTP server logs the traceback

"""The paths of the server: what each reads and answers."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from lockstep.config.sampling import SamplingParams
from lockstep.errors import LockstepError
from lockstep.tools.serve.answers import Answers, NoAnswer, event
from lockstep.tools.serve.desk import Desk, EngineBroken, Order
from lockstep.tools.serve.fields import BadRequest, Fields, shortened
from lockstep.tools.serve.gate import Gate, TooLate, error_answer
from lockstep.tools.serve.metrics import Metrics
from lockstep.tools.serve.prompts import PromptReader, requests_of
from lockstep.tools.serve.protocol import Call, GivenPrompt, TokenizeCall, read_chat, read_completion, read_tokenize
from lockstep.tools.serve.text import Vocabulary
from lockstep.workers.rollout.request import Completion

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from lockstep.tools.load_model import LoadedModel
    from lockstep.tools.serve.follow import NewerWeights
    from lockstep.workers.rollout.stream import Stream


_Answer = TypeVar("_Answer")
_LONG_BODY = 1 << 16
"""Bytes from which on a body is read in a thread of its own, so that it holds up no shorter one."""
_MOST_IDS = 1 << 16
"""Ids that /detokenize takes, or as many as the context holds."""
_LONGEST_TEXT = 1 << 20
"""Characters that /tokenize takes, or more where the context may hold more."""
_READ_ON = 64
"""How many times the longest body is read, and thrown away, before the connection is cut: who still sends does not see the answer."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server allows."""

    name: str
    """The model's name for clients."""
    api_key: str | None = None
    max_queue: int = 1024
    """Requests that may wait, beside the `max_num_seqs` that run."""
    timeout_s: float = 600.0
    """Longest time of a request."""
    max_body_bytes: int = 8 << 20
    num_tokens: int | None = None
    """Tokens that the key-value cache should hold; None: what memory allows."""
    newer: Callable[[LoadedModel], NewerWeights | None] | None = None
    """Looks for newer weights, every `follow_s`."""
    follow_s: float = 10.0
    allowed_hosts: Sequence[str] = ()
    """Names by which clients may call the server, beside addresses and those of this machine; "*": any."""


class _Events(StreamingResponse):
    """Server-sent events. However it ends, also before the first event, its order is closed."""

    def __init__(self, order: Order, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._order = order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._order.close()


class Server:
    """One model behind HTTP. `app` is the ASGI application; the engine runs while its lifespan does."""

    desk: Desk

    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self.loaded, self.options, self.metrics = loaded, options, Metrics()
        engine = loaded.engine
        # The engine's thread, those that read prompts and the event loop each have a tokenizer of their own: one is not safe in several.
        self._reader = PromptReader(copy.deepcopy(loaded.tokenizer), engine.vocabulary, engine.context)
        self._long_reader = PromptReader(copy.deepcopy(loaded.tokenizer), engine.vocabulary, engine.context)
        self._vocabulary = Vocabulary(copy.deepcopy(loaded.tokenizer))
        self._threads = {reader: ThreadPoolExecutor(1, "reader") for reader in (self._reader, self._long_reader)}
        self._created = int(time.time())
        self.routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.models),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        paths = frozenset(route.path for route in self.routes)
        self.app: ASGIApp = Gate(
            Router(self.routes, lifespan=self._lifespan),
            self.metrics,
            paths,
            options.api_key,
            options.timeout_s,
            options.allowed_hosts,
        )

    @asynccontextmanager
    async def _lifespan(self, app: ASGIApp) -> AsyncIterator[None]:
        self.desk = Desk(self._open_stream, self.loaded.engine.seats + self.options.max_queue)
        following = asyncio.ensure_future(self._follow()) if self.options.newer is not None else None
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
            await self.desk.close()
            for thread in self._threads.values():
                thread.shutdown(wait=False, cancel_futures=True)

    def give_up(self) -> None:
        """Answer whoever waits with an error, now: the server ends. On the event loop."""
        self.desk.give_up("the server is shutting down")

    async def _follow(self) -> None:
        """Change to newer weights whenever there are any."""
        assert self.options.newer is not None
        while True:
            await asyncio.sleep(self.options.follow_s)
            try:
                newer = await asyncio.to_thread(self.options.newer, self.loaded)
            except (
                Exception
            ) as error:  # a checkpoint may be deleted while it is read, which readers say in many ways: the next one comes
                why = error if isinstance(error, LockstepError) else repr(error)
                print(f"warning: the newest checkpoint could not be loaded, the one before goes on: {why}", flush=True)
                continue
            if newer is not None:
                try:
                    await self.desk.change(newer.put)
                except EngineBroken:
                    return  # requests are told so, and so is /health
                self.loaded = replace(self.loaded, source=newer.source)
                print(f"serving {self.options.name} of step {newer.source.step}", flush=True)

    def _open_stream(self) -> Stream:
        """A stream of the engine. Every request has sampling parameters of its own, so the stream's are never used."""
        default = SamplingParams(temperature=1.0, max_tokens=1, stop_token_ids=self.loaded.stop_token_ids, seed=0)
        return self.loaded.engine.open(default, num_tokens=self.options.num_tokens)

    # -- answers -------------------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(request, read_chat)

    async def _answer(self, request: Request, read: Callable[[bytes], Call]) -> Response:
        deadline = asyncio.get_running_loop().time() + self.options.timeout_s
        async with self._until(deadline):
            body = await self._body(request)
            call = read(body)
            self._check_model(call.model)
            with self._place((1 if call.is_chat else len(call.prompts)) * call.n) as order:
                prompts = await self._unless_gone(request, self._read(self._reader_of(body), call))
                requests = requests_of(call, prompts, self.loaded.stop_token_ids, self._reader.context)
                await self._unless_gone(request, order.submit(requests))
                answers = Answers(call, prompts, self.options.name, self._vocabulary)
                self.metrics.num_prompt_tokens += sum(map(len, prompts))
                if call.stream:
                    return _Events(order, self._events(order, answers, deadline))
                completions = await self._unless_gone(request, self._collect(order))
                order.close()
        whole = answers.whole(completions)
        self._count(answers, deadline)
        return JSONResponse(whole)

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Raises TooLate at the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            raise TooLate(f"the request took longer than {self.options.timeout_s:g} s, the server's --timeout-s") from error

    @contextmanager
    def _place(self, count: int) -> Iterator[Order]:
        """An order in the queue; closed when what is inside raises. Raises BadRequest, QueueFull, EngineBroken."""
        if count > self.desk.most_open:
            raise BadRequest(f"the call asks for {count} answers; this server computes at most {self.desk.most_open}", "n")
        order = self.desk.admit(count)
        try:
            yield order
        except BaseException:
            order.close()
            raise

    async def _collect(self, order: Order) -> list[Completion]:
        """The completions in the order of the call."""
        found: dict[int, Completion] = {}
        while len(found) < order.size:
            place, answer = await order.next()
            if isinstance(answer, Completion):
                found[place] = self._checked(answer)
        return [found[place] for place in range(order.size)]

    async def _events(self, order: Order, answers: Answers, deadline: float) -> AsyncIterator[bytes]:
        """The answers as they come. What goes wrong is the last event: the status has been sent."""
        for text in answers.begin():
            yield text
        is_first, num_left = True, order.size
        try:
            while num_left:
                async with asyncio.timeout_at(deadline):
                    place, answer = await order.next()
                if is_first:
                    self.metrics.first_token_s.add(self._elapsed(deadline))
                    is_first = False
                if isinstance(answer, Completion):
                    num_left -= 1
                    pieces = answers.end(place, self._checked(answer))
                else:
                    pieces = answers.tokens(place, answer)
                for text in pieces:
                    yield text
        except Exception as error:
            late = TooLate("the request took longer than the server's --timeout-s") if isinstance(error, TimeoutError) else error
            yield event(error_answer(late)[1])
            return
        for text in answers.finish():
            yield text
        self._count(answers, deadline)

    def _checked(self, completion: Completion) -> Completion:
        self.metrics.finished[completion.finish_reason] += 1
        if completion.finish_reason == "error":
            raise NoAnswer(str(completion.error))
        return completion

    def _count(self, answers: Answers, deadline: float) -> None:
        self.metrics.num_generated_tokens += answers.num_generated
        self.metrics.request_s.add(self._elapsed(deadline))

    def _elapsed(self, deadline: float) -> float:
        return asyncio.get_running_loop().time() - deadline + self.options.timeout_s

    # -- what a request must be ----------------------------------------------------------------------------------------------------

    async def _body(self, request: Request) -> bytes:
        """The whole body. Raises BadRequest for one that is too large, or no JSON.

        A page of another site cannot send application/json without asking (CORS), and nobody here says yes.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise BadRequest("expected Content-Type: application/json", status=415)
        most = self.options.max_body_bytes
        body, length = bytearray(), 0
        async for chunk in request.stream():
            length += len(chunk)
            if length <= most:
                body += chunk
            elif length > _READ_ON * most:
                break
        if length > most:
            raise BadRequest(
                f"the body is larger than {most} bytes, the server's --max-body-bytes", status=413, code="body_too_large"
            )
        return bytes(body)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.options.name):
            raise BadRequest(
                f"the model {shortened(name)!r} is not served here; this server has {self.options.name!r}",
                "model",
                404,
                "model_not_found",
            )

    def _reader_of(self, body: bytes) -> PromptReader:
        return self._reader if len(body) < _LONG_BODY else self._long_reader

    async def _read(self, reader: PromptReader, call: Call) -> list[list[int]]:
        """The ids of each prompt. Others' prompts are read between those of one call, and none that is not waited for any more."""
        prompts: Sequence[GivenPrompt] = call.prompts
        if call.messages is not None:
            prompts = [await self._in_thread(reader, reader.render, call.messages, call.tools, call.template_kwargs)]
        found = []
        for number, prompt in enumerate(prompts):
            name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            found.append(await self._in_thread(reader, reader.read, name, prompt, call.add_special_tokens))
        return found

    async def _in_thread(self, reader: PromptReader, function: Callable[..., Any], *arguments: Any) -> Any:
        """In the reader's thread: a long text would hold up everybody else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[reader], function, *arguments)

    async def _unless_gone(self, request: Request, answer: Awaitable[_Answer]) -> _Answer:
        """The answer. Raises ClientDisconnect when the client goes away first."""
        working, watching = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientDisconnect
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    # -- the rest ------------------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models and /v1/models/NAME"""
        wanted = request.path_params.get("model")
        self._check_model(wanted)
        source, context = self.loaded.source, self._reader.context
        card = {"id": self.options.name, "object": "model", "created": self._created, "owned_by": "lockstep", "root": source.path}
        card |= {"max_model_len": context, "step": source.step}
        return JSONResponse(card if wanted else {"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a text or a conversation"""
        async with self._until(asyncio.get_running_loop().time() + self.options.timeout_s):
            body = await self._body(request)
            call = read_tokenize(body)
            self._check_model(call.model)
            with self._place(1) as order:
                ids = await self._unless_gone(request, self._tokenize(self._reader_of(body), call))
                order.close()
        return JSONResponse({"count": len(ids), "max_model_len": self._reader.context, "tokens": ids})

    async def _tokenize(self, reader: PromptReader, call: TokenizeCall) -> list[int]:
        text = call.prompt
        if call.messages is not None:
            text = await self._in_thread(reader, reader.render, call.messages, call.tools, call.template_kwargs)
        assert text is not None
        most = max(_LONGEST_TEXT, reader.most_characters or 0)
        if len(text) > most:
            raise BadRequest(f"the text has {len(text)} characters; expected at most {most}: send it in parts", "prompt")
        ids: list[int] = await self._in_thread(reader, reader.encode, text, call.add_special_tokens)
        return ids

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids"""
        async with self._until(asyncio.get_running_loop().time() + self.options.timeout_s):
            body = await self._body(request)
            fields = Fields(body)
            self._check_model(fields.text("model"))
            ids = fields.integers("tokens", max(_MOST_IDS, self._reader.context or 0))
            fields.finish()
            if not all(0 <= token < self.loaded.engine.vocabulary for token in ids):
                raise BadRequest("tokens has an id that the model does not know", "tokens")
            with self._place(1) as order:
                reader = self._reader_of(body)
                text = await self._unless_gone(request, self._in_thread(reader, reader.decode, ids))
                order.close()
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: what a client needs to prepare prompts as text"""
        tokenizer = self._vocabulary.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return JSONResponse(
            {"tokenizer_class": type(tokenizer).__name__} | {name: getattr(tokenizer, name, None) for name in names}
        )

    async def health(self, request: Request) -> Response:
        """GET /health"""
        broken = self.desk.broken
        return JSONResponse(
            {"status": "ok"} if broken is None else {"status": "broken", "reason": broken}, 200 if broken is None else 503
        )

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics"""
        stream = self.desk.stream
        gauges = {
            "requests_open": self.desk.num_open,
            "requests_running": stream.num_running,
            "requests_waiting": stream.num_waiting,
            "cache_pages": stream.num_pages,
            "cache_pages_free": stream.num_free_pages,
            "cache_pages_kept": stream.num_kept_pages,
            "engine_up": self.desk.broken is None,
        }
        return PlainTextResponse(self.metrics.text(gauges), media_type="text/plain; version=0.0.4")


async def _disconnect(request: Request) -> None:
    """Returns when the client goes away. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

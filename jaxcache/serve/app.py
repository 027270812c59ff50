"""The HTTP side: routes, who may ask, how much, and what happens when a client goes away."""

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from jaxcache.engine import Delta, RequestOutput
from jaxcache.serve.config import ServerConfig
from jaxcache.serve.embeddings import EmbeddingAsk, embeddings, parse_embeddings
from jaxcache.serve.engine_thread import EngineStopped, EngineThread, StepFailed
from jaxcache.serve.metrics import Metrics
from jaxcache.serve.protocol import (
    ApiError,
    Ask,
    chat_logprobs,
    completion_logprobs,
    conversation,
    no_model,
    parse_chat,
    parse_completion,
    prompt_logprobs,
    usage,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
CLIENT_GONE = 499
"""Nobody is there to read it."""

AskT = TypeVar("AskT", Ask, EmbeddingAsk)
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def make_app(
    thread: EngineThread, metrics: Metrics, config: ServerConfig, *, on_stop: Callable[[], None]
) -> FastAPI:
    """The application around a running `thread`. `on_stop` is called when the server has drained."""
    server = _Server(thread, metrics, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(on_stop)

    app = FastAPI(title="jaxcache", lifespan=lifespan, openapi_url=None)
    for method, path, endpoint in (
        ("GET", "/", server.page),
        ("GET", "/health", server.health),
        ("GET", "/metrics", server.metrics),
        ("GET", "/stats", server.stats),
        ("GET", "/v1/models", server.models),
        ("GET", "/v1/models/{name:path}", server.model),
        ("POST", "/v1/completions", server.completions),
        ("POST", "/v1/chat/completions", server.chat_completions),
        ("POST", "/v1/embeddings", server.embeddings),
        ("POST", "/tokenize", server.tokenize),
        ("POST", "/detokenize", server.detokenize),
        ("POST", "/reset_prefix_cache", server.reset_prefix_cache),
    ):
        app.add_api_route(
            path, server.guarded(endpoint, open_to_all=path in ("/", "/health", "/metrics")), methods=[method]
        )
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_found)
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"there is no {request.method} {request.url.path} here"
    return _error_response(ApiError(status, message, code="not_found"))


class _Server:
    def __init__(self, thread: EngineThread, metrics: Metrics, config: ServerConfig) -> None:
        self._thread = thread
        self._engine = thread.engine
        self._metrics = metrics
        self._config = config
        self._model = config.served_model_name or thread.engine.name
        self._num_open = 0

    def guarded(self, endpoint: Endpoint, open_to_all: bool) -> Endpoint:
        """`endpoint` behind the key, with its errors in OpenAI's shape."""

        async def answer(request: Request) -> Response:
            try:
                if not open_to_all:
                    self._authorise(request)
                return await endpoint(request)
            except Exception as error:
                return _error_response(_api_error(error))

        return answer

    # Looking

    async def page(self, _: Request) -> Response:
        return HTMLResponse(files("jaxcache.serve").joinpath("page.html").read_text())

    async def health(self, _: Request) -> Response:
        if not self._thread.alive:
            raise ApiError(503, "the engine has stopped")
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.expose(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self, _: Request) -> Response:
        snapshot = self._thread.snapshot
        return JSONResponse(
            {
                "model": self._model,
                **snapshot.stats,
                "num_named_blocks": snapshot.num_named_blocks,
                "missed_tokens": snapshot.missed_tokens,
                "requests": list(self._thread.recent),
            }
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self._cards().values())})

    async def model(self, request: Request) -> Response:
        cards, name = self._cards(), request.path_params["name"]
        if name not in cards:
            raise no_model(name, cards)
        return JSONResponse(cards[name])

    def _cards(self) -> dict[str, dict[str, Any]]:
        """What there is to know of the model and its adapters, by name."""
        common = {"object": "model", "created": 0, "owned_by": "jaxcache"}
        common["max_model_len"] = self._engine.max_model_len
        adapters = {name: {"id": name, **common, "parent": self._model} for name in self._thread.snapshot.adapters}
        return {self._model: {"id": self._model, **common}} | adapters

    # Text and tokens

    async def tokenize(self, request: Request) -> Response:
        tokens = await asyncio.to_thread(self._tokenized, await self._body(request))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._engine.max_model_len})

    def _tokenized(self, body: Mapping[str, Any]) -> list[int]:
        if "messages" in body:
            messages, variables = conversation(body)
            return self._engine.chat_prompt(messages, **variables)
        if isinstance(body.get("prompt"), str):
            special = bool(body.get("add_special_tokens", True))
            return self._tokenizer().encode(body["prompt"], add_special_tokens=special)
        raise ApiError(400, "give prompt, a text, or messages", param="prompt")

    async def detokenize(self, request: Request) -> Response:
        tokens, limit = (await self._body(request)).get("tokens"), self._engine.runner.config.vocab_size
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < limit for token in tokens):
            raise ApiError(400, f"tokens must be a list of token ids in [0, {limit})", param="tokens")
        return JSONResponse({"prompt": self._tokenizer().decode(tokens, skip_special_tokens=False)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        running = request.query_params.get("reset_running", "false")
        if running not in ("true", "false"):
            raise ApiError(400, f"reset_running must be true or false, got {running!r}", param="reset_running")
        done = await self._thread.call(lambda: self._engine.reset_prefix_cache(running == "true"))
        if not done:
            raise ApiError(409, "requests are running: wait, or ask with reset_running=true to compute them again")
        return JSONResponse({"status": "ok"})

    # Generation

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, await self._parsed(request, parse_completion))

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, await self._parsed(request, parse_chat))

    async def embeddings(self, request: Request) -> Response:
        ask = await self._parsed(request, parse_embeddings)
        deltas = self._deltas(ask)
        outputs = await _unless_gone(request, _collect(deltas))
        await deltas.aclose()
        if outputs is None:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(embeddings(ask, [outputs[nth] for nth in sorted(outputs)], ask.adapter or self._model))

    async def _generate(self, request: Request, ask: Ask) -> Response:
        deltas = self._deltas(ask)
        first = await _unless_gone(request, anext(deltas))
        if first is None:
            await deltas.aclose()
            return Response(status_code=CLIENT_GONE)
        if ask.stream:
            return StreamingResponse(self._events(request, ask, first, deltas), media_type="text/event-stream")
        outputs = await _unless_gone(request, _collect(deltas, first))
        await deltas.aclose()
        if outputs is None:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(self._complete(ask, outputs))

    def _token_ids(self, ask: Ask | EmbeddingAsk) -> list[Any]:
        if isinstance(ask, Ask) and ask.chat:
            return [self._engine.chat_prompt(messages, **ask.chat_template_kwargs) for messages in ask.prompts]
        return [self._tokenizer().encode(one) if isinstance(one, str) else one for one in ask.prompts]

    @contextmanager
    def _places(self, ask: Ask | EmbeddingAsk) -> Iterator[int]:
        """Counts so many answers as under way; an `ApiError` where there is no room for them. Embeddings take the
        places that are free, since one can be computed after the other."""
        limit = self._config.max_queued_requests
        places = ask.num_answers
        if isinstance(ask, EmbeddingAsk):
            places = min(places, max(1, limit - self._num_open))
        if places > limit:
            raise ApiError(400, f"{places} answers are asked for at once, {limit} are allowed: ask for fewer")
        if self._num_open + places > limit:
            raise ApiError(
                429,
                f"{self._num_open} answers are under way, {limit} are allowed: try again",
                code="too_many_requests",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        self._num_open += places
        try:
            yield places
        finally:
            self._num_open -= places

    async def _deltas(self, ask: Ask | EmbeddingAsk) -> AsyncGenerator[tuple[int, Delta]]:
        """The deltas of all prompts as they come, each with its prompt's place. Left early, all are aborted."""
        merged: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

        async def follow(waiting: Iterator[tuple[int, Any]]) -> None:
            identity = {"adapter": ask.adapter, "cache_salt": ask.cache_salt}
            try:
                for nth, prompt in waiting:
                    stream = self._thread.stream(prompt, ask.params, priority=ask.priority, **identity)
                    async with aclosing(stream) as deltas:
                        async for delta in deltas:
                            merged.put_nowait((nth, delta))
                merged.put_nowait(None)
            except Exception as error:
                merged.put_nowait(error)

        with self._places(ask) as places:
            # Long texts take their time: neither the event loop nor the engine waits for that.
            prompts = await asyncio.to_thread(self._token_ids, ask)
            waiting = iter(enumerate(prompts))
            tasks = [asyncio.create_task(follow(waiting)) for _ in range(min(places, len(prompts)))]
            try:
                running = len(tasks)
                while running:
                    item = await merged.get()
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        running -= 1
                    else:
                        yield item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _complete(self, ask: Ask, outputs: dict[int, RequestOutput]) -> dict[str, Any]:
        choices = []
        for nth in sorted(outputs):
            for completion in outputs[nth].completions:
                if completion.error is not None:
                    raise ApiError(500, completion.error)
                choice: dict[str, Any] = {"index": nth * ask.params.n + completion.index, "logprobs": None}
                if ask.chat:
                    choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
                else:
                    choice |= {"text": completion.text, **self._prompt_logprobs(outputs[nth])}
                if completion.logprobs is not None:
                    choice["logprobs"] = self._logprobs(ask, completion.logprobs, 0)
                choice |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
                choices.append(choice)
        kind = "chat.completion" if ask.chat else "text_completion"
        answer = self._envelope(ask, kind, choices) | {"usage": usage(outputs.values())}
        return answer | self._prompt_logprobs(outputs[0]) if ask.chat else answer

    async def _events(
        self, request: Request, ask: Ask, first: tuple[int, Delta], deltas: AsyncGenerator[tuple[int, Delta]]
    ) -> AsyncIterator[str]:
        """Server-sent events: a chunk per delta, the usage at the end if asked for, then [DONE]."""
        outputs: dict[int, RequestOutput] = {}
        lengths: dict[int, int] = {}
        started: set[int] = set()
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        nothing = {"usage": None} if ask.include_usage else {}

        def chunk(nth: int, delta: Delta) -> dict[str, Any]:
            index = nth * ask.params.n + delta.index
            choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": delta.finish_reason}
            if ask.chat:
                role = {"role": "assistant"} if index not in started else {}
                choice["delta"] = role | {"content": delta.text}
            else:
                choice["text"] = delta.text
            started.add(index)
            if ask.params.logprobs is not None:
                choice["logprobs"] = self._logprobs(ask, delta.logprobs, lengths.get(index, 0))
            lengths[index] = lengths.get(index, 0) + len(delta.text)
            return self._envelope(ask, kind, [choice]) | nothing

        try:
            nth, delta = first
            while True:
                outputs[nth] = delta.output
                if delta.finish_reason == "error":
                    error = delta.output.completions[delta.index].error or "the request failed"
                    yield _event(ApiError(500, error).body())
                    return
                yield _event(chunk(nth, delta))
                if await request.is_disconnected():
                    return
                try:
                    nth, delta = await anext(deltas)
                except StopAsyncIteration:
                    break
            if ask.include_usage:
                yield _event(self._envelope(ask, kind, []) | {"usage": usage(outputs.values())})
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield _event(_api_error(error).body())
        finally:
            await deltas.aclose()

    def _envelope(self, ask: Ask, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = ask.adapter or self._model
        return {"id": ask.id, "object": kind, "created": ask.created, "model": model, "choices": choices}

    def _logprobs(self, ask: Ask, logprobs: Any, offset: int) -> dict[str, Any]:
        if ask.chat:
            return chat_logprobs(self._engine.tokenizer, logprobs)
        return completion_logprobs(self._engine.tokenizer, logprobs, offset)

    def _prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        if output.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._engine.tokenizer, output.prompt_logprobs)}

    # Requests

    def _authorise(self, request: Request) -> None:
        if self._config.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._config.api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _parsed(self, request: Request, parse: Callable[[Mapping[str, Any], str], AskT]) -> AskT:
        """What is asked for. Clients choose an adapter by giving its name as that of a model."""
        body = await self._body(request)
        name = body.get("model")
        if name == self._model or name not in self._thread.snapshot.adapters:
            return parse(body, self._model)
        return replace(parse(body | {"model": self._model}, self._model), adapter=name)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object sent; never more than the limit is read."""
        limit, data = self._config.max_body_bytes, bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_long")
        try:
            body = json.loads(data)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}")
        return body

    def _tokenizer(self) -> Any:
        if self._engine.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: it takes and gives token ids")
        return self._engine.tokenizer


async def _collect(
    deltas: AsyncIterator[tuple[int, Delta]], first: tuple[int, Delta] | None = None
) -> dict[int, RequestOutput]:
    """The outputs of all prompts, by their place, once they have ended."""
    outputs = {} if first is None else {first[0]: first[1].output}
    async for nth, delta in deltas:
        outputs[nth] = delta.output
    return outputs


async def _unless_gone(request: Request, work: Any) -> Any:
    """What `work` gives, or `None` once the client has hung up; `work` is cancelled then."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, hanging = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({working, hanging}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, hanging):
            task.cancel()
        await asyncio.gather(working, hanging, return_exceptions=True)


def _event(data: dict[str, Any]) -> str:
    """In ASCII: some clients end lines at U+0085 and U+2028 too."""
    return f"data: {json.dumps(data)}\n\n"


def _error_response(error: ApiError) -> Response:
    """In ASCII, since messages quote what clients sent, and UTF-8 has no bytes for half of a surrogate pair."""
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


def _api_error(error: Exception) -> ApiError:
    """`error` as the client is told of it. Of what nobody foresaw, the log says more than the client hears."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, ValueError):
        too_long = re.search(r"max_model_len|raise CacheConfig.num_blocks", message)
        return ApiError(400, message, code="context_length_exceeded" if too_long else None)
    if isinstance(error, EngineStopped | StepFailed):
        return ApiError(503 if isinstance(error, EngineStopped) else 500, message)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed over this request ({type(error).__name__}); its log says more")

"""The HTTP routes. Each handler reads a request, submits it to the driver, and sends the answer. `openai` and
`replies` define the formats.

A handler is cancelled when its client goes away (`handler_cancellation` in `serve`). However a handler ends,
it aborts the requests that it submitted. An abort has no effect on an ended request. So an abandoned request
never keeps its blocks.
"""

import asyncio
import itertools
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from model_server.core.engine import Engine
from model_server.core.request import Adapter, Constraint, Request, RequestId
from model_server.server.backends import Backend
from model_server.server.driver import EngineDriver, Mailbox
from model_server.server.errors import ANTHROPIC_TYPES, ApiError, EngineStoppedError, UnexpectedError
from model_server.server.front_ends import (
    OWN_FORM_FIELD,
    EmbeddingsBody,
    EmbeddingsReply,
    MessagesReply,
    chat_of_messages,
    completion_of_embeddings,
)
from model_server.server.metrics import Metrics
from model_server.server.models import ServedModels
from model_server.server.openai import Job, LoadAdapterBody, RequestReader, UnloadAdapterBody, read_body
from model_server.server.remote_prefill import BLOCKS_PATH, HEADER, BlocksAsked, RemotePrefill
from model_server.server.replies import Delta, Reply, error_event
from model_server.server.responses import Responses, ResponsesBody, ResponsesReply
from model_server.text.language import SchemaError

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""An answer returns a client's x-request-id of this form. Any other id is replaced by an id of this
server.
"""

_CLIENT_GONE = 499
"""The status of an answer whose client has gone. No client reads it. An exception instead of an answer would
write a traceback to the log."""
_READ_AT_ONCE_BYTES = 64 * 1024
_PICTURES = re.compile(rb"image|\\u006")  # in the types of pictures, where letters may be escaped
_RESPONSE = "/v1/responses/{id}"
_RAW = web.RequestKey("raw", bytes)
"""The body of a request that was read."""

_log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True)
class Api:
    engine: Engine
    driver: EngineDriver
    reader: RequestReader
    models: ServedModels
    backend: Backend
    metrics: Metrics
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    max_body_bytes: int
    runtime_lora: bool
    """Lets clients load and unload adapters. Without it the paths for this do not exist, as in vLLM."""
    kv_event_sources: Callable[[], dict[str, dict[str, Any]]]
    remote_prefill: RemotePrefill | None = None
    """Lets this server and other servers compute prompts for each other."""

    def __post_init__(self) -> None:
        self._started_at = int(self.wall_clock())
        self._numbers = itertools.count()
        self._responses = Responses(self.reader.prompts)
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="request-reader")

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_errors_in_api_shape])
        app.router.add_post("/v1/completions", partial(self._create, self.reader.completion, Reply))
        app.router.add_post("/v1/chat/completions", partial(self._create, self.reader.chat, Reply))
        app.router.add_post("/v1/messages", partial(self._create, self._read_messages, MessagesReply))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/v1/responses", self._create_response)
        app.router.add_get(_RESPONSE, self._stored_response)
        app.router.add_delete(_RESPONSE, self._stored_response)
        app.router.add_post(f"{_RESPONSE}/cancel", self._stored_response)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/v1/models", self._list_models)
        if self.runtime_lora:
            app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/ping", self._health)
        app.router.add_get("/version", self._version)
        if self.remote_prefill is not None:
            app.router.add_post(BLOCKS_PATH, self._kv_blocks)
        app.router.add_get("/kv_event_sources", self._list_kv_event_sources)
        app.router.add_get("/metrics", self._metrics_page)
        app.on_cleanup.append(self._stop_reading)
        return app

    async def _stop_reading(self, _: web.Application) -> None:
        self._reading.shutdown(wait=False, cancel_futures=True)

    async def _create(
        self, read: Callable[[bytes], Job], reply: type[Reply], http: web.Request
    ) -> web.StreamResponse:
        arrival_s = self.clock()
        job = await self._read(http, read)
        return await self._answer(http, job, reply(**self._head(http, job)), arrival_s)

    def _read_messages(self, raw: bytes) -> Job:
        return self.reader.chat(chat_of_messages(raw))

    async def _count_tokens(self, http: web.Request) -> web.Response:
        count = len(await self._read(http, lambda raw: self.reader.tokenize(chat_of_messages(raw))))
        return web.json_response({"input_tokens": count})

    async def _create_response(self, http: web.Request) -> web.StreamResponse:
        def read(raw: bytes) -> tuple[ResponsesBody, Job, list[dict[str, Any]]]:
            body = read_body(raw, ResponsesBody)
            chat, messages = self._responses.chat_of(body)
            return body, self.reader.chat(chat), messages

        arrival_s = self.clock()
        body, job, messages = await self._read(http, read)
        # The id is random even if the client names one, because it opens the conversation.
        head = {**self._head(http, job), "reply_id": uuid.uuid4().hex}
        reply = ResponsesReply(**head, body=body, messages=messages, kept_by=self._responses)
        return await self._answer(http, job, reply, arrival_s)

    async def _stored_response(self, http: web.Request) -> web.Response:
        """Return or forget a stored response, or refuse to cancel it or to stream it again."""
        name = http.match_info["id"]
        if (found := self._responses.stored(name)) is None:
            raise web.HTTPNotFound
        if http.method == "POST" or http.query.get("stream", "false").lower() not in ("false", "0"):
            raise ApiError("This response has ended; none is made in the background here.")
        if http.method == "DELETE":
            self._responses.forget(name)
            found = {"id": name, "object": "response", "deleted": True}
        return web.json_response(found)

    async def _embeddings(self, http: web.Request) -> web.StreamResponse:
        def read(raw: bytes) -> tuple[EmbeddingsBody, Job]:
            body = read_body(raw, EmbeddingsBody)
            return body, self.reader.completion(completion_of_embeddings(body))

        if not self.backend.made_up:
            raise ApiError("This model computes no embeddings: start the server with --runner cost.")
        arrival_s = self.clock()
        body, job = await self._read(http, read)
        return await self._answer(http, job, EmbeddingsReply(**self._head(http, job), body=body), arrival_s)

    async def _read(self, http: web.Request, read: Callable[[bytes], Outcome]) -> Outcome:
        """Read the body. Long bodies, and those with pictures, are read in a thread, one after the other,
        since tokenizing their text takes seconds. aiohttp's own `read` copies long bodies on the event loop.
        """
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._reading)
        pieces, size = [], 0
        async for piece in http.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > self.max_body_bytes:
                why = f"the body has more than {self.max_body_bytes:,} bytes, the limit (--max-body-bytes)"
                raise web.HTTPRequestEntityTooLarge(self.max_body_bytes, size, reason=why)
        at_once = size <= _READ_AT_ONCE_BYTES
        raw = http[_RAW] = b"".join(pieces) if at_once else await in_thread(b"".join, pieces)
        return read(raw) if at_once and not _PICTURES.search(raw) else await in_thread(read, raw)

    def _head(self, http: web.Request, job: Job) -> dict[str, Any]:
        sent_id = http.headers.get("x-request-id", "")
        return {
            "reply_id": sent_id if _REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex,
            "chat": job.chat,
            "model": job.model,
            "created": int(self.wall_clock()),
            "answers_each": job.answers_each,
            "include_usage": job.include_usage,
            "calls": job.form.calls if job.form is not None else "",
        }

    async def _answer(
        self, http: web.Request, job: Job, reply: Reply, arrival_s: float
    ) -> web.StreamResponse:
        requests = self._requests(job, arrival_s, await self._constraints(job))
        prefiller = http.headers.get(HEADER, "")
        if prefiller and self.remote_prefill is not None:
            await self.remote_prefill.fetch(prefiller, http.path, http[_RAW], requests)
        mailbox = Mailbox()
        # A forced call comes whole, since its name and its arguments are apart in the answer's shape.
        pieces = job.stream and not (job.form is not None and job.form.calls)
        self.driver.submit(requests, mailbox, stream=pieces, stops=job.stops)
        try:
            headers = {"x-request-id": reply.reply_id}
            if job.stream:
                return await self._send_stream(http, _events(job, reply, requests, mailbox), headers)
            deltas: list[Delta] = []
            while len(deltas) < len(requests):
                deltas += await mailbox.take()
            return web.json_response(reply.whole(deltas, requests), headers=headers)
        finally:
            self.driver.abort(requests)

    async def _send_stream(
        self, http: web.Request, pieces: AsyncIterator[bytes], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Send the headers at once, before anything is computed, as vLLM does. Then send events as tokens
        come.
        """
        stream = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        response = web.StreamResponse(headers={**headers, **stream})
        await response.prepare(http)
        try:
            async for piece in pieces:
                await response.write(piece)
        except EngineStoppedError as error:
            await response.write(error_event(error.body()))
        except ConnectionError:
            return response  # the client has gone, so nothing more can be sent
        except Exception:  # noqa: BLE001 - after any fault the client gets an error, and the log the traceback
            _log.exception("a stream failed")
            await response.write(error_event(UnexpectedError().body()))
        await response.write_eof()
        return response

    async def _constraints(self, job: Job) -> Sequence[Constraint | None]:
        """Return a constraint for each answer. The reader's thread makes them, because this may take a
        second.
        """
        if job.form is None:
            return [None] * len(job.prompts)
        make = self.backend.language.constraints
        made = partial(make, job.form.alternatives, count=len(job.prompts))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, made)
        except SchemaError as error:
            message = f"The form of the answer cannot be used: {error}."
            raise ApiError(message, param=job.form.param) from error

    def _requests(
        self, job: Job, arrival_s: float, constraints: Sequence[Constraint | None]
    ) -> list[Request]:
        return [
            Request(
                request_id=RequestId(str(next(self._numbers))),
                token_ids=list(prompt),
                max_tokens=job.max_tokens,
                arrival_s=arrival_s,
                ignore_eos=job.ignore_eos,
                adapter=job.adapter,
                cache_salt=job.cache_salt,
                seed=seed,
                sampling=sampling,
                constraint=constraint,
            )
            for prompt, seed, sampling, constraint in zip(
                job.prompts, job.seeds, job.samplings, constraints, strict=True
            )
        ]

    async def _kv_blocks(self, http: web.Request) -> web.Response:
        assert self.remote_prefill is not None, "this path exists only with the flag"
        try:
            question = await self._read(http, partial(msgspec.json.decode, type=BlocksAsked))
            held = self.remote_prefill.held(question)
        except ValueError as error:
            raise ApiError("The body is not a list of hashes in hexadecimal.", param="hashes") from error
        return web.json_response({"held": held.held})

    async def _list_models(self, _: web.Request) -> web.Response:
        names = self.models.names
        base = [self._card(name, root=self.models.root, parent=None) for name in names]
        adapters = [
            self._card(adapter.name, root=adapter.path or adapter.name, parent=names[0])
            for adapter in self.models.adapters
        ]
        return web.json_response({"object": "list", "data": base + adapters})

    def _card(self, name: str, *, root: str, parent: str | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "prefix-gateway",
            "root": root,
            "parent": parent,
            "max_model_len": self.engine.config.max_len_tokens,
        }

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await self._read(http, partial(read_body, kind=LoadAdapterBody))
        self.models.load(Adapter(body.lora_name, body.lora_path))
        return web.Response(text=f"Adapter {body.lora_name} is loaded.")

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        body = await self._read(http, partial(read_body, kind=UnloadAdapterBody))
        self.models.unload(body.lora_name)
        return web.Response(text=f"Adapter {body.lora_name} is unloaded.")

    async def _tokenize(self, http: web.Request) -> web.Response:
        tokens = await self._read(http, self.reader.tokenize)
        length = self.engine.config.max_len_tokens
        return web.json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def _detokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"prompt": await self._read(http, self.reader.detokenize)})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.driver.reset_prefix_cache()
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.driver.draining else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": metadata.version("prefix-gateway")})

    async def _list_kv_event_sources(self, _: web.Request) -> web.Response:
        return web.json_response(self.kv_event_sources())

    async def _metrics_page(self, _: web.Request) -> web.Response:
        page = generate_latest(self.metrics.registry)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})


async def _events(job: Job, reply: Reply, requests: list[Request], mailbox: Mailbox) -> AsyncIterator[bytes]:
    """Yield the events of a stream. Events that come together are sent in one piece."""
    open_choices = len(requests)
    first: list[bytes] | None = None
    while open_choices:
        deltas = await mailbox.take()
        shown = requests if job.usage_in_each_event else [None] * len(requests)
        first = reply.begin(requests) if first is None else []
        events = first + [reply.event(delta, request=shown[delta.index]) for delta in deltas]
        open_choices -= sum(delta.finish_reason is not None for delta in deltas)
        if not open_choices:
            events += reply.end(requests)
        yield b"".join(events)


@web.middleware
async def _errors_in_api_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    status, headers = 400, {}
    try:
        _refuse_compressed(request)
        return await handler(request)
    except ApiError as error:
        if error.retry_after_s is not None:
            headers = {"retry-after": str(error.retry_after_s)}
        own = OWN_FORM_FIELD.get(request.path, "response_format")
        fields = error.body()["error"].items()
        status = error.status
        body = {"error": {name: text and text.replace("response_format", own) for name, text in fields}}
    except web.HTTPException as error:
        headers = {"allow": error.headers["allow"]} if "allow" in error.headers else {}
        status, body = error.status, ApiError(f"{request.method} {request.path}: {error.reason}").body()
    except web.RequestPayloadError as error:
        body = ApiError(f"The body cannot be read: {' '.join(str(error).split())}").body()
    except ConnectionError:
        return web.Response(status=_CLIENT_GONE)
    except Exception:  # noqa: BLE001 - after any fault the client gets an error, and the log the traceback
        _log.exception("%s %s failed", request.method, request.path)
        status, body = 500, UnexpectedError().body()
    shown: dict[str, object] = {**body}
    if request.path.startswith("/v1/messages"):  # Anthropic's clients go by both types
        error_type = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        shown = {"type": "error", "error": {**body["error"], "type": error_type}}
    return web.json_response(shown, status=status, headers=headers)


def _refuse_compressed(request: web.Request) -> None:
    """Refuse compressed bodies. vLLM does not unpack bodies either."""
    coding = request.headers.get("content-encoding", "").strip()
    if coding.lower() not in ("", "identity"):
        raise ApiError(
            f"This server does not read bodies with content-encoding {coding[:100]}; send the body uncompressed."
        )

"""A request's way through the engine as an HTTP response, streamed or whole, and its end if nobody waits."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_mlx.server.engine import Engine
from dflash_mlx.server.frames import Frames
from dflash_mlx.server.jobs import Job, Message
from dflash_mlx.server.refusals import CONTENT_TYPE, encode, refusal

if TYPE_CHECKING:
    from dflash_mlx.session import Prepared

Finish = Callable[[Frames, BaseException | None], None]
"""Told how an answer ended."""

Beat = Callable[[], Awaitable[None]]
"""Says that a stream is alive."""


class Inbox:
    """Messages from the engine's thread, for one coroutine; None says that the client has gone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()

    def deliver(self, message: Message | None) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    async def take(self, timeout: float | None) -> list[Message | None]:
        """All messages that are there, at least one unless the time is over."""
        messages: list[Message | None] = []
        try:
            async with asyncio.timeout(timeout):
                messages.append(await self._queue.get())
        except TimeoutError:
            return []
        while not self._queue.empty():
            messages.append(self._queue.get_nowait())
        return messages


class Reply(Response):
    """Answers while it is called; the request was put into the engine's queue before.

    Args:
        engine: what the job was submitted to.
        heartbeat: seconds of silence after which a stream says that it is alive.
        stream: send frames as they come, else one body.
        finish: called once, when the answer is complete or has failed.
    """

    def __init__(
        self,
        engine: Engine,
        prepared: "Prepared",
        frames: Frames,
        *,
        stream: bool,
        heartbeat: float,
        request_id: str,
        finish: Finish,
    ) -> None:
        self.background = None
        self._engine, self._frames, self._heartbeat = engine, frames, heartbeat
        self._stream, self._request_id, self._finish = stream, request_id, finish
        self._inbox = Inbox()
        self._told = 0.0  # when the stream said something last
        self._job = Job(prepared, self._inbox.deliver, frames.texts_of)
        engine.submit(self._job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_stream(send) if self._stream else self._send_whole(scope, receive, send))
        finally:
            watch.cancel()
            self._engine.cancel(self._job)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._inbox.deliver(None)

    async def _send_stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._tell(send, self._frames.begin())

        async def beat() -> None:
            await self._tell(send, self._frames.heartbeat())

        while not self._frames.over:
            messages = await self._inbox.take(self._silence)
            if None in messages:
                return
            if not messages:
                await beat()
            frames = [await self._read(message, beat) for message in messages if message is not None]
            await self._tell(send, b"".join(frames))
        self._finish(self._frames, self._frames.error)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self._frames.over:
            for message in await self._inbox.take(None):
                if message is None:
                    return
                await self._read(message)
        error = self._frames.error
        self._finish(self._frames, error)
        if error is None:
            response = Response(encode(self._frames.body()), media_type=CONTENT_TYPE)
        else:
            response = refusal(error, self._request_id).response()
        await response(scope, receive, send)

    async def _read(self, message: Message, beat: Beat | None = None) -> bytes:
        """The frames of a message; if it takes long to make them, others are answered meanwhile.

        Args:
            message: what the engine said.
            beat: says that the stream is alive, whenever it was silent for too long.
        """
        if not self._frames.slow(message):
            return self._frames.add(message)
        reader = ThreadPoolExecutor(1, "reader")
        try:
            frames = asyncio.get_running_loop().run_in_executor(reader, self._frames.add, message)
            while beat is not None and not (await asyncio.wait([frames], timeout=self._silence))[0]:
                await beat()
            return await frames
        finally:
            reader.shutdown(wait=False)

    @property
    def _silence(self) -> float:
        """Seconds until the stream has been silent for too long."""
        return max(0.0, self._told + self._heartbeat - asyncio.get_running_loop().time())

    async def _tell(self, send: Send, frames: bytes) -> None:
        if frames:
            await send({"type": "http.response.body", "body": frames, "more_body": True})
            self._told = asyncio.get_running_loop().time()

"""The thread that owns the model: it loads, decodes one request after the other, and frees.

All of MLX happens here. Requests come in by `submit`, from any thread, and what becomes of them goes out by
their `deliver`, which is called on this thread and must not wait.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dflash_mlx.errors import DFlashError
from dflash_mlx.events import Block, Finished
from dflash_mlx.server.facts import Facts, Memory
from dflash_mlx.server.jobs import Begun, Failed, Job, Queued, Step
from dflash_mlx.server.metrics import Counts
from dflash_mlx.server.refusals import Refusal
from dflash_mlx.server.tokens import TokenTexts

if TYPE_CHECKING:
    from dflash_mlx.session import Prepared, Session

log = logging.getLogger(__name__)

MEMORY_EVERY = 0.25
"""Seconds between two looks at the memory while decoding."""


Progress = tuple[str, int, int]
"""A phase of loading, how much of it is done, and of how much."""

Load = Callable[[Callable[[str, int, int], None]], "Session"]


@dataclass(frozen=True)
class Status:
    """What anybody may ask about the engine at any time."""

    state: Literal["loading", "ok", "failed"]
    message: str | None = None
    progress: Progress | None = None
    facts: Facts | None = None


class _Stopped(BaseException):
    """The engine was told to end while it was loading."""


class Engine:
    """Loads a session on a thread of its own and runs requests on it, first come first served.

    Args:
        load: makes the session; told where to report what is under way, and how far it is in bytes.
        max_queue: requests that may wait; more are refused.
        max_context: tokens of a conversation at most; None: what the model was made for.
        on_ready, on_failed: called on the engine's thread, the latter with what ended it.
    """

    def __init__(
        self,
        load: Load,
        *,
        max_queue: int = 8,
        max_context: int | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.max_queue = max_queue
        self.status = Status("loading", progress=("loading", 0, 0))
        self.memory = Memory()
        self.counts = Counts()
        self._load, self._max_context = load, max_context
        self._on_ready, self._on_failed = on_ready, on_failed
        self._session: Session | None = None
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # Templates and tokenizers take time and are not made for two threads at once.
        self._preparer = ThreadPoolExecutor(1, "preparer")

    # --- called from any thread -----------------------------------------------------------------

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """End what runs, fail what waits, free the model; whether that was done in time."""
        with self._changed:
            self._stopping = True
            if self._running is not None and self._session is not None:
                self._session.cancel()
            self._changed.notify_all()
        self._preparer.shutdown(wait=False, cancel_futures=True)
        if timeout != 0:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def queue(self) -> dict[str, int]:
        """How many requests run, wait, and may wait."""
        return {
            "running": int(self._running is not None),
            "waiting": len(self._waiting),
            "limit": self.max_queue,
        }

    def ready(self) -> Facts:
        """About the loaded pair.

        Raises:
            Refusal: 503, it is not there yet or not any more; 429, too many requests wait.
        """
        status = self.status
        if status.state == "failed":
            raise Refusal(
                503, f"the engine has ended: {status.message}; restart the server", code="engine_failed"
            )
        if status.facts is None or self._stopping:
            word = "stopping" if self._stopping else "loading the model"
            raise Refusal(503, f"the server is {word}: try again later", code="not_ready")
        if len(self._waiting) + (self._running is not None) > self.max_queue:
            waiting = f"{len(self._waiting)} requests wait already"
            raise Refusal(429, f"{waiting}: try again later", code="queue_full")
        return status.facts

    async def prepare(self, prompt: Any, params: Any, **settings: Any) -> "Prepared":
        """`Session.prepare`, on a thread that may take its time; needs `ready` before."""
        assert self._session is not None
        future = self._preparer.submit(self._session.prepare, prompt, params, **settings)
        return await asyncio.wrap_future(future)

    def submit(self, job: Job) -> None:
        """Put a request at the end of the queue.

        Raises:
            Refusal: as `ready`.
        """
        with self._changed:
            self.ready()
            self._waiting.append(job)
            if ahead := len(self._waiting) - (self._running is None):
                job.deliver(Queued(ahead))
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Forget a request: at once if it waits, after the current block or prompt chunk if it runs."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._say_who_is_next()
            elif job is self._running and self._session is not None:
                self._session.cancel()

    # --- the engine's thread --------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._open()
            self._on_ready()
            while (job := self._next()) is not None:
                self._run(job)
            if self._session is not None:
                self._session.close()
        except _Stopped:
            pass
        except BaseException as error:
            message = str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
            log.error("the engine ended: %s", message)
            log.debug("traceback", exc_info=True)
            self.status = replace(self.status, state="failed", message=message)
            self._on_failed(error)
        finally:
            self._fail_all()
            self._session = None

    def _open(self) -> None:
        session = self._load(self._progressed)
        # MLX and mlx-lm take seconds to import, and this server answers meanwhile.
        from dflash_mlx.server import measure

        self._measure_memory = measure.memory
        if self._max_context is not None:
            session.limit_context(self._max_context)
        self.status = Status("loading", progress=("measuring", 0, 0))
        found = measure.facts(session)
        self._texts = TokenTexts(session.tokenizer)
        self.memory = measure.memory()
        self._session = session
        self.status = Status("ok", facts=found)

    def _progressed(self, what: str, done: int, total: int) -> None:
        if self._stopping:
            raise _Stopped
        phase = (what, done, total) if done < total else ("checking", 0, 0)
        self.status = Status("loading", progress=phase)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            self._say_who_is_next()
            return self._running

    def _say_who_is_next(self) -> None:
        for i, job in enumerate(self._waiting):
            job.deliver(Queued(i + (self._running is not None)))

    def _run(self, job: Job) -> None:
        """One request; whatever it raises is its own affair."""
        self.counts.requests += 1
        try:
            self._decode(job)
        except Exception as error:
            self.counts.failures += 1
            job.deliver(Failed(error))
        except BaseException as error:
            job.deliver(Failed(error))
            raise
        finally:
            with self._changed:
                self._running = None
            self.memory = self._measure_memory()

    def _decode(self, job: Job) -> None:
        assert self._session is not None
        events = self._session.run(job.prepared)
        # From here on a cancellation is remembered by the session; before, only by the job.
        if job.cancelled or self._stopping:
            self._session.cancel()
        job.deliver(Begun(len(job.prepared.ids)))
        looked = time.monotonic()
        for event in events:
            self.counts.count(event)
            if self._stopping and isinstance(event, Finished):
                raise Refusal(503, "the server is stopping", code="not_ready")
            job.deliver(Step(event, self._texts.of(job.texts_of(event))))
            if isinstance(event, Block) and time.monotonic() - looked > MEMORY_EVERY:
                self.memory, looked = self._measure_memory(), time.monotonic()

    def _fail_all(self) -> None:
        with self._changed:
            error = Refusal(503, "the server is stopping", code="not_ready")
            if self.status.state == "failed":
                error = Refusal(503, f"the engine has ended: {self.status.message}", code="engine_failed")
            for job in self._waiting:
                job.deliver(Failed(error))
            self._waiting.clear()
            self._stopping = True

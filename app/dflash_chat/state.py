"""What the chat knows, as plain data: events go in, widgets and plain mode read. No terminal, no network.

Times are those of the caller's clock, in seconds. Speeds come from the engine's own clock (each cycle says
how long it took), so they do not depend on how busy the terminal is.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_chat import wire
from dflash_chat.wire import Cycle, Ended, Event, Failed, Reading, Said, Started, Token, Totals, Waiting

Phase = Literal[
    "loading", "waiting", "reading", "thinking", "generating", "done", "length", "stopped", "failed"
]
LIVE: tuple[Phase, ...] = ("loading", "waiting", "reading", "thinking", "generating")
ENDS: dict[str, Phase] = {"length": "length", "cancelled": "stopped"}

RECENT = 1.0  # seconds of engine time that the speed shown while generating looks back
BUCKET = 0.1  # seconds of engine time behind one column of the sparkline
BUCKETS = 64


@dataclass
class Reply:
    """One reply, growing or complete.

    Attributes:
        sent: when its request was made; `first` when its first text came, `ended` when it was over.
        tokens: how many it has; the first comes from the prompt's own pass.
        first_tokens: that first token, for the tokens view; `cycles` hold all others.
        decode_seconds: engine time of all cycles.
    """

    sent: float = 0.0
    phase: Phase = "loading"
    text: str = ""
    reasoning: str = ""
    error: str = ""
    ahead: int = 0
    read: int = 0
    to_read: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    reasoning_tokens: int = 0
    first_tokens: tuple[Token, ...] = ()
    cycles: list[Cycle] = field(default_factory=list)
    decode_seconds: float = 0.0
    first: float | None = None
    answered: float | None = None
    ended: float | None = None
    tau: float | None = None
    histogram: Counter[int] = field(default_factory=Counter)
    _buckets: list[list[float]] = field(default_factory=list)  # tokens and seconds of each column

    @property
    def live(self) -> bool:
        """Whether more may come."""
        return self.phase in LIVE

    def apply(self, event: Event, now: float) -> None:
        """Take one event in. After the end nothing but the server's totals counts."""
        if not self.live and not isinstance(event, Totals):
            return
        match event:
            case Waiting(ahead):
                self.phase, self.ahead = "waiting", ahead
            case Reading(done, total):
                self.phase, self.read, self.to_read = "reading", done, total
            case Started():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                self.prompt_seconds, self.first_tokens = event.seconds, event.tokens
                self._count(len(event.tokens))
                if self.phase not in ("thinking", "generating"):
                    self.phase = "generating"
            case Cycle():
                self._cycle(event)
            case Said(text, reasoning):
                self._say(text, reasoning, now)
            case Ended(reason):
                self.phase = ENDS.get(reason, "done")
                self.ended = now
            case Totals():
                self._totals(event)
            case Failed(message):
                self.phase, self.error, self.ended = "failed", message, now

    def stop(self, now: float) -> None:
        """The reader has had enough; what was said stays."""
        if self.live:
            self.phase, self.ended = "stopped", now

    @property
    def speed(self) -> float | None:
        """Tokens per second of the whole reply."""
        decoded = self.tokens - len(self.first_tokens)
        return decoded / self.decode_seconds if self.decode_seconds > 0 and decoded > 0 else None

    @property
    def recent_speed(self) -> float | None:
        """Tokens per second of the last second of engine time."""
        tokens = seconds = 0.0
        for cycle in reversed(self.cycles):
            tokens, seconds = tokens + len(cycle.tokens), seconds + cycle.seconds
            if seconds >= RECENT:
                break
        return tokens / seconds if seconds > 0 else None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of successive moments, for a sparkline."""
        return [tokens / seconds for tokens, seconds in self._buckets if seconds > 0]

    @property
    def accepted(self) -> float | None:
        """Acceptance length tau: tokens per verify cycle, the target's own included."""
        if self.tau is not None:
            return self.tau
        cycles = self.histogram.total()
        return sum(size * n for size, n in self.histogram.items()) / cycles if cycles else None

    @property
    def thought_seconds(self) -> float:
        """How long it thought, as the reader saw it."""
        end = self.answered or self.ended
        return end - self.first if self.first is not None and end is not None and self.reasoning else 0.0

    def _cycle(self, cycle: Cycle) -> None:
        self.cycles.append(cycle)
        self._count(len(cycle.tokens))
        self.decode_seconds += cycle.seconds
        if cycle.drafted:
            self.histogram[len(cycle.tokens)] += 1
        if not self._buckets or self._buckets[-1][1] >= BUCKET:
            self._buckets.append([0.0, 0.0])
            del self._buckets[:-BUCKETS]
        self._buckets[-1][0] += len(cycle.tokens)
        self._buckets[-1][1] += cycle.seconds

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        if self.phase == "thinking":
            self.reasoning_tokens += tokens

    def _say(self, text: str, reasoning: str, now: float) -> None:
        self.first = now if self.first is None else self.first
        self.reasoning += reasoning
        self.text += text
        if text and self.answered is None:
            self.answered = now
        self.phase = "generating" if text or self.text else "thinking"

    def _totals(self, totals: Totals) -> None:
        self.prompt_tokens = totals.prompt_tokens or self.prompt_tokens
        self.tokens = totals.reply_tokens or self.tokens
        self.decode_seconds = totals.reply_seconds or self.decode_seconds
        self.tau = totals.tau if totals.tau is not None else self.tau

    def figures(self) -> dict[str, Any]:
        """What is kept of the numbers when the reply is saved."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "prompt_seconds": round(self.prompt_seconds, 4),
            "decode_seconds": round(self.decode_seconds, 4),
            "first_seconds": round(self.first - self.sent, 4) if self.first is not None else None,
            "thought_seconds": round(self.thought_seconds, 4),
            "tau": None if self.accepted is None else round(self.accepted, 4),
            "histogram": {str(size): n for size, n in sorted(self.histogram.items())},
        }

    @staticmethod
    def from_figures(text: str, reasoning: str, phase: str, error: str, saved: Mapping[str, Any]) -> "Reply":
        """A reply of an earlier run; what is missing or odd in its figures counts as zero."""

        def number(key: str) -> float:
            return wire.number(saved.get(key))

        known: dict[str, Phase] = {"done": "done", "length": "length", "failed": "failed"}
        reply = Reply(phase=known.get(phase, "stopped"), text=text, reasoning=reasoning, error=error)
        reply.prompt_tokens, reply.tokens = int(number("prompt_tokens")), int(number("tokens"))
        reply.reasoning_tokens = int(number("reasoning_tokens"))
        reply.prompt_seconds, reply.decode_seconds = number("prompt_seconds"), number("decode_seconds")
        if saved.get("first_seconds") is not None:
            reply.first = number("first_seconds")
            reply.answered = reply.first + number("thought_seconds")
        reply.tau = number("tau") or None
        histogram = saved.get("histogram")
        for size, n in (histogram if isinstance(histogram, dict) else {}).items():
            if size.isascii() and size.isdigit() and len(size) <= 4:
                reply.histogram[int(size)] = int(wire.number(n))
        return reply


@dataclass
class Turn:
    """What the reader said, and the reply to it."""

    prompt: str
    reply: Reply

    @property
    def counts(self) -> bool:
        """Whether the model is told of it: a turn that failed, or was stopped before its answer, is not."""
        return bool(self.reply.text) and self.reply.phase != "failed"


@dataclass(frozen=True)
class Engine:
    """What /health says, or what is known without it.

    Attributes:
        status: starting (no answer yet), loading, ok, failed (it said so), dead (our child ended) or
            unreachable (nothing answers at the address).
    """

    status: Literal["starting", "loading", "ok", "failed", "dead", "unreachable"] = "starting"
    message: str = ""
    base_url: str = ""
    model: str = ""
    drafter: str = ""
    loading: str = ""
    loaded_bytes: float = 0.0
    total_bytes: float = 0.0
    block_size: int = 0
    exactness: str = ""
    context_window: int = 0
    notes: tuple[str, ...] = ()
    memory: float = 0.0
    memory_peak: float = 0.0
    memory_total: float = 0.0
    plain_speed: float | None = None
    reasoning_levels: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.status == "ok"

    @staticmethod
    def from_health(body: Mapping[str, Any], base_url: str) -> "Engine":
        """Read /health; what is missing or of another type counts as unknown."""

        def text(key: str) -> str:
            value = body.get(key)
            return value if isinstance(value, str) else ""

        def number(mapping: Any, key: str) -> float:
            return wire.number(mapping.get(key)) if isinstance(mapping, Mapping) else 0.0

        def texts(key: str) -> tuple[str, ...]:
            value = body.get(key)
            return tuple(str(each) for each in value) if isinstance(value, list) else ()

        progress, memory = body.get("progress"), body.get("memory")
        status = body.get("status")
        return Engine(
            status=status if status in ("loading", "ok", "failed") else "unreachable",
            message=text("message") or ("" if status else "not a dflash server: /health has no status"),
            base_url=text("base_url") or f"{base_url}/v1",
            model=text("model"),
            drafter=text("drafter"),
            loading=str(progress.get("phase", "")) if isinstance(progress, Mapping) else "",
            loaded_bytes=number(progress, "done"),
            total_bytes=number(progress, "total"),
            block_size=int(number(body, "block_size")),
            exactness=text("exactness"),
            context_window=int(number(body, "context_window")),
            notes=texts("notes"),
            memory=number(memory, "active"),
            memory_peak=number(memory, "peak"),
            memory_total=number(memory, "total"),
            plain_speed=number(body, "plain_tokens_per_second") or None,
            reasoning_levels=texts("reasoning_levels"),
        )


@dataclass
class ChatState:
    """One open chat and the engine that it talks to."""

    turns: list[Turn] = field(default_factory=list)
    engine: Engine = field(default_factory=Engine)
    title: str = ""
    system: str = ""
    options: dict[str, float] = field(default_factory=dict)  # request fields that /set gave
    thinking: str | None = None  # a level of the model's; None: its own default
    own_engine: bool = False  # the engine is a child of this process, which can start it again

    @property
    def last(self) -> Turn | None:
        """The newest turn."""
        return self.turns[-1] if self.turns else None

    @property
    def reply(self) -> Reply | None:
        """The newest turn's reply."""
        return self.turns[-1].reply if self.turns else None

    @property
    def live(self) -> bool:
        """Whether a reply is on its way."""
        return self.reply is not None and self.reply.live

    @property
    def context_tokens(self) -> int:
        """How many tokens the newest counted conversation holds, as far as the server has said."""
        for turn in reversed(self.turns):
            if turn.reply.prompt_tokens:
                return turn.reply.prompt_tokens + turn.reply.tokens
        return 0

    def request(self) -> dict[str, Any]:
        """The body that asks for the newest turn's reply."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:-1]:
            if turn.counts:
                messages.append({"role": "user", "content": turn.prompt})
                messages.append({"role": "assistant", "content": turn.reply.text})
        messages.append({"role": "user", "content": self.turns[-1].prompt})
        body: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True, "include_dflash": True},
            **self.options,
        }
        if self.engine.model:
            body["model"] = self.engine.model
        if self.thinking is not None:
            body["reasoning_effort"] = "none" if self.thinking == "off" else self.thinking
        return body

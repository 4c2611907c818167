"""Decode every prompt plainly and with every block size, in turns: A B C C B A."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_mlx.benchmark.prompts import Task
from dflash_mlx.errors import UsageError
from dflash_mlx.params import SamplingParams
from dflash_mlx.prompt import Prompt
from dflash_mlx.result import Result
from dflash_mlx.session import Session

PLAIN = "plain"


@dataclass(frozen=True)
class Measured:
    """One prompt: the replies of every way to decode, two of each."""

    category: str
    replies: dict[str, tuple[Result, ...]]
    difference: str | None = None

    @property
    def equal(self) -> bool:
        """Whether all replies have the same tokens."""
        return len({reply.tokens for replies in self.replies.values() for reply in replies}) == 1

    def speedup(self, mode: str) -> float | None:
        """Tokens per second over those of plain decoding; None for a reply too short to time."""
        seconds = {m: sum(r.decode_seconds for r in self.replies[m]) for m in (PLAIN, mode)}
        tokens = {m: sum(len(r.tokens) - 1 for r in self.replies[m]) for m in (PLAIN, mode)}
        if not all((*seconds.values(), *tokens.values())):
            return None
        return (tokens[mode] / seconds[mode]) / (tokens[PLAIN] / seconds[PLAIN])


@dataclass(frozen=True)
class Benchmark:
    """A session and how to ask it."""

    session: Session
    params: SamplingParams
    modes: tuple[str, ...]
    reasoning: str | None = None
    cooldown: float = 0.0

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Compile kernels and fill caches: what is measured later has been run before."""
        short = SamplingParams(max_tokens=16)
        for mode in (PLAIN, *self.modes):
            self._reply(self._prompt(tasks[0], [], tasks[0].turns[0]), mode, short)

    def run(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Every turn of every task.

        Raises:
            UsageError: a prompt is empty.
        """
        for task in tasks:
            if not all(turn.strip() for turn in task.turns):
                raise UsageError(f"a prompt of the category {task.category} is empty")
        for task in tasks:
            history: list[dict[str, str]] = []
            for turn in task.turns:
                time.sleep(self.cooldown)
                prompt = self._prompt(task, history, turn)
                measured = self._measure(task.category, prompt)
                yield measured
                answer = measured.replies[PLAIN][0].text
                history += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]

    def _measure(self, category: str, prompt: Prompt) -> Measured:
        order = (PLAIN, *self.modes)
        replies: dict[str, list[Result]] = {mode: [] for mode in order}
        for mode in (*order, *reversed(order)):
            replies[mode].append(self._reply(prompt, mode, self.params))
        plain = replies[PLAIN][0]
        other = next((r for m in order for r in replies[m] if r.tokens != plain.tokens), None)
        difference = None if other is None else self._difference(prompt, plain, other)
        return Measured(category, {mode: tuple(r) for mode, r in replies.items()}, difference)

    def _prompt(self, task: Task, history: list[dict[str, str]], turn: str) -> Prompt:
        return turn if task.raw else [*history, {"role": "user", "content": turn}]

    def _reply(self, prompt: Prompt, mode: str, params: SamplingParams) -> Result:
        return self.session.generate(
            prompt,
            params,
            block_size=None if mode in (PLAIN, "auto") else int(mode),
            speculative=mode != PLAIN,
            reasoning=None if isinstance(prompt, str) else self.reasoning,
        )

    def _difference(self, prompt: Prompt, plain: Result, other: Result) -> str:
        """Where two replies part, and how near plain decoding was to the other token."""
        pairs = zip(plain.tokens, other.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(other.tokens)))
        if at == min(len(plain.tokens), len(other.tokens)):
            return f"one reply ends after {at} tokens, the other goes on"
        ours, theirs = plain.tokens[at], other.tokens[at]
        ids = self.session.encode(prompt, reasoning=None if isinstance(prompt, str) else self.reasoning)
        [entry] = self.session.generate(
            [*ids, *plain.tokens[:at]], SamplingParams(max_tokens=1, top_logprobs=20), speculative=False
        ).logprobs
        known = dict(entry.top)
        margin = f"{known[ours] - known[theirs]:.2e} nats" if {ours, theirs} <= set(known) else "large"
        return f"token {at + 1} is {theirs} instead of {ours}; margin in plain decoding {margin}"

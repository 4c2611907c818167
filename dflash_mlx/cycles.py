"""The cycles of one reply: draft, verify, accept, commit. Knows token ids only, no text."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from dflash_mlx.decision import Decision
from dflash_mlx.drafter import Draft, Embed, Head
from dflash_mlx.events import Block, FinishReason, Prefilled, Prefilling
from dflash_mlx.lookup import Lookup
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Plan, Policy
from dflash_mlx.target.caches import Cache, Checkpoint, arrays
from dflash_mlx.target.target import Target
from dflash_mlx.target.window import LARGEST_BLOCK

CLEAR_EVERY = 256
"""Tokens between two releases of MLX's buffer cache, as in mlx-lm."""

Take = Callable[[Sequence[int]], tuple[int, bool]]
"""Newly chosen tokens -> how many of them belong to the reply, and whether it ends with the last of those."""

Blocks = Generator[Block, None, FinishReason]

FEED_EVERY = 16
"""Cycles without the drafter whose taps wait for it: it reads its weights once for all of them."""

QUIET = 0.1
"""Share of a cycle that the caller may take between two without the next one looking quicker for it."""


class Proposer(Protocol):
    """What the loop asks of a drafter; `dflash_mlx.drafter.Drafter` is one."""

    @property
    def arrays(self) -> list[mx.array]:
        """What `extend` and `propose` leave to evaluate."""

    def extend(self, taps: mx.array) -> None:
        """Take in the taps of committed rows."""

    def propose(
        self,
        anchor: int,
        block_size: int,
        embed: Embed,
        head: Head,
        temperature: float,
        noise: mx.array | None,
        taps: mx.array | None,
    ) -> Draft:
        """Take in the taps of committed rows, if any, and draft `block_size - 1` tokens after the anchor."""


@dataclass(frozen=True)
class _Pass:
    """A forward pass over one row that is under way.

    Attributes:
        checkpoint: where the caches stood before it.
        ahead: whether it was started before its token was known.
    """

    checkpoint: Checkpoint
    logits: mx.array
    taps: mx.array | None
    ahead: bool


@dataclass(frozen=True)
class _Drafted:
    """A draft that is under way or was copied, and the noise of the block's positions."""

    plan: Plan
    draft: Draft
    noise: mx.array | None


@dataclass
class Cycles:
    """The parts of one decoding, its steps, and where it stands.

    Attributes:
        rows: in the caches, the committed ones.
        count: tokens of the reply; `anchor` is the last of them.
        lookup: the prompt and the reply so far, if drafts may be copied from them.
        waiting: taps of committed rows that the drafter has not taken in yet.
        ahead: what was started for the next cycle, so that the device works while Python does.
        clock: when the last cycle's result was known; time that the caller takes does not count.
        undisturbed: whether the caller took hardly any, so that the device did not get ahead in it.
    """

    target: Target
    caches: list[Cache]
    sampler: Sampler
    drafter: Proposer | None
    policy: Policy
    take: Take
    max_tokens: int | None
    rows: int = 0
    count: int = 0
    anchor: int = 0
    lookup: Lookup | None = None
    waiting: list[mx.array] = field(default_factory=list)
    ahead: _Pass | _Drafted | None = None
    draft_checked: bool = False
    clock: float = 0.0
    undisturbed: bool = True

    def prefill(
        self,
        prompt: Sequence[int],
        start: int,
        ends: Sequence[int],
        cancelled: Callable[[], bool],
        reached: Callable[[int], None],
    ) -> Generator[Prefilling, None, mx.array | None]:
        """Read the prompt in chunks, then its last token alone, as mlx-lm does: the numbers are the same.

        Returns:
            Logits of the last row `[1, V]`, or None if cancelled.
        """
        for end in ends:
            if end != ends[0]:
                yield Prefilling(done=start, total=len(prompt))
            if cancelled():
                return None
            _, taps = self.target.forward(mx.array(list(prompt[start:end])), self.caches)
            self._take(taps)
            mx.eval(arrays(self.caches))
            mx.clear_cache()
            reached(end)
            start = end
        if cancelled():
            return None
        logits, taps = self.target.forward(mx.array([prompt[-1]]), self.caches)
        self._take(taps)
        self.rows = len(prompt)
        return logits

    def first(self, logits: mx.array) -> tuple[Prefilled, bool]:
        """Choose the first token; also whether the reply ends with it."""
        tokens, logprobs, _ = Decision(self.sampler.choose(logits, None, self.sampler.noise(1))).wait()
        _, ended = self.take(tokens)
        self.sampler.commit(tokens)
        self.anchor, self.count = tokens[0], 1
        return Prefilled(tuple(tokens), logprobs=logprobs, seed=self.sampler.seed), ended

    def blocks(self, cancelled: Callable[[], bool], context: list[int] | None) -> Blocks:
        """Cycles after the first token until the reply ends; returns why.

        Args:
            context: what drafts may be copied from.
        """
        try:
            self.clock = time.perf_counter()
            self._start(self._next(0))
            if context is not None:  # By now the device has something to do meanwhile.
                self.lookup = Lookup(context)
            while self.count != self.max_tokens:
                if cancelled():
                    return "cancelled"
                block, ended = (
                    self._speculate(self.ahead) if isinstance(self.ahead, _Drafted) else self._step()
                )
                _release_buffers(self.count, block.committed)
                handed_out = time.perf_counter()
                yield block
                waited = time.perf_counter() - handed_out
                self.clock += waited
                self.undisturbed = waited < QUIET * block.seconds
                if ended:
                    return "stop"
            return "length"
        finally:
            if isinstance(self.ahead, _Pass):
                self.ahead.checkpoint.restore(0)
            self._feed()

    def _step(self) -> tuple[Block, bool]:
        """A plain cycle, whose pass is under way; also whether the reply ends with it.

        What follows is decided before the token is known. If that is another plain cycle, its pass is started
        too, so that Python's share of a step costs no time, as in mlx-lm.
        """
        current = self.ahead
        assert isinstance(current, _Pass)
        decision = Decision(self.sampler.choose(current.logits, None, self.sampler.noise(1)))
        plan = self._next(1)
        following = self._launch(decision.choice.tokens, ahead=True) if plan.rows == 1 else None
        tokens, logprobs, _, waited = decision.timed()
        _, ended = self.take(tokens)
        # The first plain step in a row starts late, and the last one starts no other.
        usual = current.ahead and following is not None
        seconds = self._commit(tokens, current.taps, Plan(1), 0, usual)
        self.ahead = following
        if plan.rows > 1 and not ended:
            # What was to be copied may have ended with the token that is known now.
            self._start(self._next(0) if plan.match else plan)
        return Block(tuple(tokens), logprobs=logprobs, seconds=seconds, wait_seconds=waited), ended

    def _speculate(self, drafted: _Drafted) -> tuple[Block, bool]:
        """Verify, accept and commit a block; also whether the reply ends with it."""
        draft, rows = drafted.draft, drafted.plan.rows
        copied = drafted.plan.match > 0
        block = mx.array([self.anchor])
        block = mx.concatenate([block, draft.tokens.astype(block.dtype)])
        try:
            logits, taps = self.target.verify(block, self.caches)
            choice = self.sampler.choose(logits, draft.tokens, drafted.noise)
            choices, logprobs, drafts, waited = Decision(choice, draft, check=not self.draft_checked).timed()
            self.draft_checked |= not copied
            accepted = min(_accept(choices, drafts), choice.usable - 1)
            kept, ended = self.take(choices[: accepted + 1])
        except BaseException:
            self.target.commit(0, rows)
            raise
        self.ahead = None
        try:
            taps = None if taps is None else taps[:, :kept]
            seconds = self._commit(choices[:kept], taps, drafted.plan, accepted)
            following = Plan(0) if ended else self._next(0)
            if following.rows > 1:  # The device drafts while Python builds the rollback.
                self._start(following)
        finally:
            self.target.commit(kept, rows)
        if following.rows == 1:
            self._start(following)
        event = Block(
            tuple(choices[:kept]),
            logprobs=logprobs[:kept],
            drafted=len(drafts),
            accepted=min(accepted, kept),
            rejected=tuple(drafts[min(accepted, kept) :]),
            copied=copied,
            seconds=seconds,
            wait_seconds=waited,
        )
        return event, ended

    def _next(self, known_ahead: int) -> Plan:
        """The next cycle once so many more tokens are there; no rows if the reply is then complete."""
        limit = LARGEST_BLOCK
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens - self.count - known_ahead)
        if limit <= 0:
            return Plan(0)
        match = self.lookup.match if self.lookup else 0
        plan = self.policy.plan(limit, self.rows + known_ahead, match)
        rows = max(1, min(limit, plan.rows))
        return Plan(rows, plan.match if rows > 1 else 0)

    def _start(self, plan: Plan) -> None:
        """Start what the next cycle needs: its pass if it is plain, else its draft."""
        self.ahead = self._launch(mx.array([self.anchor])) if plan.rows == 1 else self._draft(plan)

    def _launch(self, token: mx.array, *, ahead: bool = False) -> _Pass:
        """Start a pass over one token `[1]`, which need not be known yet."""
        checkpoint = Checkpoint(self.caches)
        try:
            logits, taps = self.target.forward(token, self.caches)
        except BaseException:
            checkpoint.restore(0)
            raise
        mx.async_eval(logits)
        return _Pass(checkpoint, logits, taps, ahead)

    def _draft(self, plan: Plan) -> _Drafted:
        noise = self.sampler.noise(plan.rows)
        if plan.match:
            assert self.lookup is not None
            draft = Draft(mx.array(self.lookup.draft(plan.rows - 1)), mx.array(True))
            return _Drafted(plan, draft, noise)
        assert self.drafter is not None
        draft = self.drafter.propose(
            self.anchor,
            plan.rows,
            self.target.embed,
            self.target.draft_head,
            self.sampler.temperature,
            None if noise is None else noise[:-1],
            self._waiting_taps(),
        )
        mx.async_eval(draft.tokens, *self.drafter.arrays)
        return _Drafted(plan, draft, noise)

    def _commit(
        self, tokens: list[int], taps: mx.array | None, plan: Plan, accepted: int, usual: bool = True
    ) -> float:
        """Note what a cycle added to the reply; returns the seconds since the one before.

        Args:
            usual: whether these say how long such a cycle takes.
        """
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        timed = usual and self.undisturbed
        self.policy.observe(plan, accepted, seconds if timed else 0.0, self.rows)
        self.sampler.commit(tokens)
        if self.lookup:
            self.lookup.extend(tokens)
        self.rows, self.count, self.anchor = self.rows + len(tokens), self.count + len(tokens), tokens[-1]
        self._take(taps, every=FEED_EVERY)
        return seconds

    def _take(self, taps: mx.array | None, every: int = 1) -> None:
        """Keep taps of committed rows until there are enough for the drafter."""
        if self.drafter is not None and taps is not None:
            self.waiting.append(taps)
            if len(self.waiting) >= every:
                self._feed()

    def _feed(self) -> None:
        """Let the drafter take in what waits for it, although it is not about to draft."""
        taps = self._waiting_taps()
        if self.drafter is not None and taps is not None:
            self.drafter.extend(taps)
            # Else cycles without a draft would pile up a graph that holds their taps.
            mx.async_eval(*self.drafter.arrays)

    def _waiting_taps(self) -> mx.array | None:
        """Hand over what waits for the drafter, `[1, n, taps * H]`."""
        taps, self.waiting = self.waiting, []
        return mx.concatenate(taps, axis=1) if len(taps) > 1 else taps[0] if taps else None


def _release_buffers(count: int, committed: int) -> None:
    """Give MLX's unused buffers back now and then."""
    if count // CLEAR_EVERY > (count - committed) // CLEAR_EVERY:
        mx.clear_cache()


def _accept(choices: list[int], drafts: list[int]) -> int:
    """How many draft tokens, from the first, are what the target would have chosen."""
    return next((i for i, token in enumerate(drafts) if token != choices[i]), len(drafts))

"""A loaded pair: prompts in, events out. Owns the tokenizer; everything below knows token ids only."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from dflash_mlx import calibrate, hub, memory
from dflash_mlx.chat_template import levels, render
from dflash_mlx.decode import Proposer, decode
from dflash_mlx.drafter import Drafter, DrafterModel, load_drafter
from dflash_mlx.errors import (
    ContextLengthError,
    OutOfMemoryError,
    UsageError,
    WrongThreadError,
    memory_errors,
)
from dflash_mlx.events import Event, Finished, Prefilled
from dflash_mlx.kernels import Kernels, Walker
from dflash_mlx.pairs import EMBEDDED, drafter_for
from dflash_mlx.params import SamplingParams
from dflash_mlx.result import Result, collect
from dflash_mlx.sampling import Sampler, check_bias
from dflash_mlx.schedule import Adaptive, Costs, Fixed, Policy
from dflash_mlx.target import Target, load_target
from dflash_mlx.target.exactness import EXACT, FAST, measure_exactness
from dflash_mlx.target.load import Tokenizer, read_weights
from dflash_mlx.text import Reply, Thinking

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text (taken raw), token ids, or chat messages."""

Progress = Callable[[str, int, int], None]
"""Told what is under way, such as "downloading owner/name", the bytes that are done, and all of them."""

NUMERICS = ("exact", "fast")


@dataclass(frozen=True)
class Prepared:
    """A request that was checked, with all that it leaves open decided: running it will not refuse it.

    Attributes:
        ids: the prompt.
        thinking: the markers of the reply's reasoning, if any are known.
        block_size: rows of a verify pass; None: chosen for every cycle.
        max_tokens: of the reply, within the context; None: the context's length is not known.
    """

    ids: tuple[int, ...]
    thinking: Thinking | None
    params: SamplingParams
    block_size: int | None
    speculative: bool
    max_tokens: int | None


class Session:
    """A target, its tokenizer and, unless it only decodes plainly, the drafter made for it.

    Everything of MLX belongs to the thread that made the session; `cancel` may be called from any, and
    `prepare` from any, one at a time.

    Attributes:
        target: the target.
        tokenizer: mlx-lm's tokenizer wrapper.
        drafter: the drafter network, or None.
        notes: what the user should know about how the pair was loaded.
        exactness: "exact" if speculation cannot change a token on this machine, else what differs.
        fallbacks: what runs slower than it could, because a kernel does not exist or failed here, and why.
        prefill_step: prompt rows per forward pass, speculating or not.
        block_size: rows of a verify pass where a request names none; None: chosen for every cycle.
        defaults: how the model's makers sample from it; what `stream` does without parameters is greedy.
        room: tokens of context that there is memory for, if that is less than the target could have.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        drafter: DrafterModel | None = None,
        *,
        notes: tuple[str, ...] = (),
        prefill_step: int = 2048,
        block_size: int | None = None,
        defaults: SamplingParams | None = None,
        room: int | None = None,
    ) -> None:
        if prefill_step < 1:
            raise UsageError(f"prefill_step is {prefill_step}: it must be a positive integer")
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.notes = notes
        self.prefill_step = prefill_step
        self.defaults = defaults or SamplingParams()
        self.block_size: int | None = None
        self.room = room
        self.exactness = EXACT
        self.fallbacks: tuple[str, ...] = ()
        self._walker: Walker | None = None
        self._cancelled = threading.Event()
        self._owner = threading.get_ident()
        self._known_ids = 1 + max(tokenizer.get_vocab().values())
        if drafter is None and target.kernels.fast:
            target.attach_linears()  # so that plain decoding is the same with and without a drafter
            self.fallbacks = target.linears.fallbacks
            self.exactness = FAST if target.linears.uses_tile else EXACT
        if drafter is not None:
            self._attach(drafter)
        self.block_size = self._check_block(block_size)

    def _attach(self, drafter: DrafterModel) -> None:
        """Attach the drafter to the target, and have every kernel compiled before the first reply."""
        config = drafter.config
        self.target.check_fit(config)
        self.target.attach(config.target_layer_ids)
        self.fallbacks = self.target.linears.fallbacks
        if config.selector_rank and self.target.kernels.device.metal:
            shape = config.selector_top_k, config.selector_rank, drafter.dtype
            self._walker, problem = self.target.kernels.walker(*shape)
            if problem:
                self.fallbacks += (f"the candidate walk runs in MLX's own ops: {problem}",)
        sizes = range(2, config.block_size + 1)
        self.exactness = measure_exactness(self.target, sizes, config.target_layer_ids)
        if self.exactness == EXACT and self.target.linears.uses_tile:
            self.exactness = FAST

    # --- prompts ------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, reasoning: str | None = None) -> list[int]:
        """Token ids of a prompt; `reasoning` as for `stream`.

        Raises:
            UsageError: the prompt is empty, or is none of text, token ids and messages.
        """
        return self._encode(prompt, reasoning)[0]

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        block_size: int | None = None,
        speculative: bool = True,
        reasoning: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prepared:
        """Check a request and turn its prompt into ids, for `run`; uses nothing of MLX.

        Arguments and errors as for `stream`; `variables` sets what else the model's chat template reads,
        and `tools` are functions that the model may call, as OpenAI's clients describe them.
        """
        params = params or SamplingParams()
        ids, thinking = self._encode(prompt, reasoning, variables, tools)
        check_bias(params, self.target.vocab_size)
        return Prepared(
            tuple(ids),
            thinking,
            params,
            self._check_block(block_size),
            speculative,
            self._max_tokens(ids, params),
        )

    def _encode(
        self,
        prompt: Prompt,
        reasoning: str | None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[int], Thinking | None]:
        thinking = None
        if prompt and _all(prompt, Mapping):
            messages = [dict(cast(Mapping[str, Any], message)) for message in prompt]
            rendered = render(self.tokenizer, messages, reasoning=reasoning, variables=variables, tools=tools)
            ids, thinking = list(rendered.ids), rendered.thinking
        elif reasoning is not None or variables:
            name, value = ("reasoning", reasoning) if reasoning is not None else ("variables", variables)
            raise UsageError(f"{name} is {value!r}: it needs messages, a raw prompt has no template")
        elif isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif _all(prompt, int):
            ids = [int(cast(int, token)) for token in prompt]
        else:
            raise UsageError(f"prompt is a {type(prompt).__name__}: pass text, token ids, or messages")
        if not ids:
            raise UsageError("the prompt is empty: it must hold at least one token")
        if bad := [t for t in ids if not 0 <= t < self.target.vocab_size]:
            raise UsageError(f"token id {bad[0]} is not in the vocabulary: [0, {self.target.vocab_size})")
        return ids, thinking

    # --- replies ------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        block_size: int | None = None,
        speculative: bool = True,
        reasoning: str | None = None,
    ) -> Iterator[Event]:
        """Decode, handing out one event per verify cycle as soon as it is committed.

        Args:
            prompt: text (taken raw), token ids, or messages for the chat template.
            params: greedy and as long as the context allows, unless told otherwise.
            block_size: rows of a verify pass, 1 to the drafter's own; None: the session's own, or for each
                cycle the size that is fastest here and for this text, by what earlier cycles showed.
            speculative: False decodes plainly, which gives the same tokens.
            reasoning: off, on, low, medium, high or xhigh, where the model's template offers it; None:
                the model's default.

        Raises:
            UsageError: an argument cannot be honoured; nothing was computed.
            NumericsError: a model produced NaN or infinity.
            WrongThreadError: the session belongs to another thread.
        """
        self._check_thread()
        return self.run(
            self.prepare(prompt, params, block_size=block_size, speculative=speculative, reasoning=reasoning)
        )

    def run(self, request: Prepared) -> Iterator[Event]:
        """Decode what `prepare` made ready; errors as for `stream`."""
        self._check_thread()
        params = request.params
        policy = self._policy(request.block_size, speculative=request.speculative)
        sampler = Sampler(params, request.ids, self.target.vocab_size, self._known_ids)
        reply = Reply(self.tokenizer, eos=self._eos, stop=tuple(params.stop), thinking=request.thinking)
        network = self.drafter if request.speculative else None
        drafter = None if network is None else Drafter(network, self._walker)
        self._cancelled.clear()
        return self._events(request.ids, sampler, reply, drafter, policy, request.max_tokens)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        block_size: int | None = None,
        speculative: bool = True,
        reasoning: str | None = None,
    ) -> Result:
        """The whole reply; arguments and errors as for `stream`."""
        return collect(
            self.stream(prompt, params, block_size=block_size, speculative=speculative, reasoning=reasoning)
        )

    def cancel(self) -> None:
        """End what is running after its current block or prompt chunk; may be called from any thread."""
        self._cancelled.set()

    @property
    def largest_block(self) -> int:
        """Rows of the block that the drafter was trained for; 1 without a drafter."""
        return 1 if self.drafter is None else self.drafter.config.block_size

    @cached_property
    def costs(self) -> Costs:
        """What cycles cost on this machine: remembered, or measured when first asked for, in some seconds.

        Raises:
            UsageError: there is no drafter.
        """
        self._check_thread()
        if self.drafter is None:
            raise UsageError("there is no drafter, so there is no block size to choose")
        return calibrate.costs(self.target, self.drafter, self.exactness)

    @property
    def reasoning_levels(self) -> tuple[str, ...]:
        """What `reasoning` may be, from none to most."""
        return levels(self.tokenizer)

    def limit_context(self, tokens: int) -> None:
        """Refuse what would need a longer context than this, though the target could read it."""
        known = self.target.context_length
        self.target.context_length = tokens if known is None else min(tokens, known)

    @property
    def context_window(self) -> int | None:
        """Tokens that a prompt and its reply may have together; None: not known."""
        known = [limit for limit in (self.target.context_length, self.room) if limit is not None]
        return min(known, default=None)

    def close(self) -> None:
        """Leave the target model as mlx-lm loaded it."""
        self.target.detach()

    def _events(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        reply: Reply,
        drafter: Proposer | None,
        policy: Policy,
        max_tokens: int | None,
    ) -> Iterator[Event]:
        self._check_thread()
        events = decode(
            self.target,
            self.target.make_cache(),
            ids,
            sampler,
            drafter=drafter,
            policy=policy,
            max_tokens=max_tokens,
            take=reply.take,
            prefill_step=self.prefill_step,
            cancelled=self._cancelled.is_set,
        )
        fallbacks = () if drafter is None else self.fallbacks
        with memory_errors():
            for event in events:
                text, thought = reply.finish() if isinstance(event, Finished) else reply.drain()
                event = replace(event, text=text, reasoning=thought)
                yield replace(event, fallbacks=fallbacks) if isinstance(event, Prefilled) else event
                self._check_thread()

    @property
    def _eos(self) -> frozenset[int]:
        return frozenset(int(token) for token in self.tokenizer.eos_token_ids)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThreadError(
                "this session belongs to the thread that loaded it: MLX's arrays and streams cannot cross "
                "threads; run it there, and call only cancel() from elsewhere"
            )

    def _max_tokens(self, ids: list[int], params: SamplingParams) -> int | None:
        limit = self.context_window
        if limit is None:
            return params.max_tokens
        left = limit - len(ids)
        if left < 1 and limit == self.room:
            raise OutOfMemoryError(
                f"the prompt has {len(ids)} tokens: there is memory for a context of {limit} tokens; "
                "shorten it, or use a target with fewer bits"
            )
        if left < 1:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens: this model's maximum context length is {limit} tokens"
            )
        return left if params.max_tokens is None else min(left, params.max_tokens)

    def _check_block(self, block_size: int | None) -> int | None:
        """The block size, or what this session uses without one.

        Raises:
            UsageError: it is not one that the drafter was trained for.
        """
        if block_size is None:
            return self.block_size
        trained = self.largest_block
        if not 1 <= block_size <= trained:
            made_for = (
                "there is no drafter" if self.drafter is None else f"the drafter was trained for {trained}"
            )
            raise UsageError(f"block_size is {block_size}: it must be between 1 and {trained} ({made_for})")
        return block_size

    def _policy(self, block_size: int | None, *, speculative: bool) -> Policy:
        if self.drafter is None or not speculative:
            return Fixed(1)
        return self._adaptive if block_size is None else Fixed(block_size)

    @cached_property
    def _adaptive(self) -> Adaptive:
        """One for all replies: the next text is most like the last."""
        return Adaptive(self.costs)


def _all(prompt: object, kind: type) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(item, kind) for item in prompt)


def load(
    target: str | None = None,
    drafter: str | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    draft_bits: int | None = None,
    adapter: str | None = None,
    dequantize: bool = False,
    numerics: str = "exact",
    block_size: int | None = None,
    prefill_step: int = 2048,
    progress: Progress | None = None,
) -> Session:
    """Load a pair.

    Args:
        target: folder or hub id of an mlx-lm model; None: the embedded target.
        drafter: folder or hub id of a DFlash drafter; None: the one known for this target; "none": plain.
        revision, draft_revision: branch, tag or commit on the hub; a known drafter has one of its own.
        draft_bits: quantize the drafter's linear layers to 4 or 8 bits.
        adapter: folder or hub id of a LoRA adapter for the target, as mlx-lm trains them.
        dequantize: turn a quantized target into float32.
        numerics: "exact", where plain decoding has mlx-lm's bits, or "fast", where on a GPU a quantized
            target's has others, and larger blocks cost less; speculation changes no token in either.
        block_size: rows of a verify pass where a request names none; None: for each cycle what is fastest.
        prefill_step: prompt rows per forward pass.
        progress: told what is under way, a download or the reading of weights, and how far it is.

    Raises:
        ModelError: a model cannot be found, read, or used, or the two do not belong together.
        OutOfMemoryError: there is no room for the pair; its weights were not read.
        UsageError: an argument is out of range.
    """
    if draft_bits not in (None, 4, 8):
        raise UsageError(f"draft_bits is {draft_bits!r}: it must be 4 or 8")
    if numerics not in NUMERICS:
        raise UsageError(f"numerics is {numerics!r}: it must be exact or fast")
    limit = memory.available()
    target = target or EMBEDDED.target
    folder, notes = _get(target, revision, progress)
    if drafter is None:
        match = drafter_for(folder, target)
        drafter, draft_revision = match.pair.drafter, draft_revision or match.pair.revision
        notes += [match.note] if match.note else []
    # The drafter first: it is small, and what is wrong with it is known before the target is read.
    network = None
    if drafter != "none":
        draft_folder, more = _get(drafter, draft_revision, progress)
        notes += more
        network = load_drafter(draft_folder, bits=draft_bits)
    adapter_folder = None if adapter is None else hub.resolve(adapter)
    with memory_errors():
        kernels = Kernels(fast=numerics == "fast")
        if kernels.fast and not kernels.device.metal:
            notes.append("there is no GPU: numerics are exact")
        loaded = load_target(folder, adapter=adapter_folder, dequantize=dequantize, kernels=kernels)
        plan = memory.plan(loaded.target, network, prefill_step)
        room: int | None = memory.check_room(plan, limit)
        if room == plan.longest:
            room = None
        else:
            notes.append(f"there is memory for {room:,} tokens of context")
        memory.wire()
        read_weights(loaded.target, None if progress is None else partial(progress, "loading weights"))
        return Session(
            loaded.target,
            loaded.tokenizer,
            network,
            notes=(*notes, *loaded.notes),
            prefill_step=prefill_step,
            block_size=block_size,
            defaults=loaded.defaults,
            room=room,
        )


def _get(name: str, revision: str | None, progress: Progress | None) -> tuple[Path, list[str]]:
    """The folder of a model, and which commit it is."""
    report = None if progress is None else partial(progress, f"downloading {name}")
    folder = hub.resolve(name, revision, report)
    commit = hub.commit(folder)
    return folder, [] if commit is None else [f"{name} at commit {commit}"]

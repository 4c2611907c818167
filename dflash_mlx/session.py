"""A loaded pair: prompts in, events out. Owns the tokenizer; everything below knows token ids only."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx import calibrate
from dflash_mlx.block_sizes import BlockSizes
from dflash_mlx.chat_template import levels
from dflash_mlx.costs import Costs
from dflash_mlx.cycles import CLEAR_EVERY
from dflash_mlx.decode import decode
from dflash_mlx.drafter import Drafter, DrafterModel
from dflash_mlx.errors import (
    ContextLengthError,
    UsageError,
    WrongThreadError,
    memory_errors,
)
from dflash_mlx.events import Event, Finished, Prefilled
from dflash_mlx.kernels import Walker
from dflash_mlx.params import SamplingParams
from dflash_mlx.prefix_cache import Context, PrefixCache
from dflash_mlx.prompt import Prompt, encode
from dflash_mlx.result import Result, collect
from dflash_mlx.sampling import Sampler, check_bias
from dflash_mlx.schedule import PLAIN, Policy
from dflash_mlx.target import Target
from dflash_mlx.target.exactness import EXACT, FAST, measure_exactness
from dflash_mlx.target.load import Tokenizer
from dflash_mlx.text import Reply, Thinking


@dataclass(frozen=True)
class Prepared:
    """A request that was checked, with all that it leaves open decided: running it will not refuse it.

    Attributes:
        ids: the prompt.
        turns: how many of its tokens other prompts may begin with too.
        thinking: the markers of the reply's reasoning, if any are known.
        block_size: rows of a verify pass; None: chosen for every cycle.
        max_tokens: of the reply, within the context; None: the context's length is not known.
    """

    ids: tuple[int, ...]
    turns: tuple[int, ...]
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
        defaults: how the model's makers sample from it; what `stream` does without parameters is greedy.
        room: tokens of context that there is memory for, if that is less than the target could have.
        walker: a kernel for the drafter's selector, if it has one here.

    Args:
        prefixes: bytes that caches of earlier requests may take, for prompts that begin alike.
        spare: bytes that a context of so many tokens leaves for them; None: enough.
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
        prefixes: int = 0,
        spare: Callable[[int], int] | None = None,
    ) -> None:
        if prefill_step < 1:
            raise UsageError(f"prefill_step is {prefill_step}: it must be a positive integer")
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.notes = notes
        self.prefill_step = prefill_step
        self.defaults = defaults or SamplingParams()
        self.room = room
        self.exactness = EXACT
        self.fallbacks: tuple[str, ...] = ()
        self._prefixes = PrefixCache(self._new_context, prefixes) if prefixes else None
        self._spare = spare
        self.walker: Walker | None = None
        self._cancelled = threading.Event()
        self._owner = threading.get_ident()
        self._known_ids = 1 + max(tokenizer.get_vocab().values())
        if drafter is None and target.kernels.fast:
            target.attach_linears()  # so that plain decoding is the same with and without a drafter
            self.fallbacks = target.linears.fallbacks
            self.exactness = FAST if target.linears.uses_tile else EXACT
        if drafter is not None:
            self._attach(drafter)
        self._block_sizes = BlockSizes(drafter, block_size, self._measure_costs)

    def _attach(self, drafter: DrafterModel) -> None:
        """Attach the drafter to the target, and have every kernel compiled before the first reply."""
        config = drafter.config
        self.target.check_fit(config)
        self.target.attach(config.target_layer_ids, drafter.head_ids)
        self.fallbacks = self.target.linears.fallbacks
        if config.selector_rank and self.target.kernels.device.metal:
            shape = config.selector_top_k, config.selector_rank, drafter.dtype
            self.walker, problem = self.target.kernels.walker(*shape)
            if problem:
                self.fallbacks += (f"the candidate walk runs in MLX's own ops: {problem}",)
        sizes = range(2, config.block_size + 1)
        self.exactness = measure_exactness(self.target, sizes, config.target_layer_ids)
        if self.exactness == EXACT and self.target.linears.uses_tile:
            self.exactness = FAST

    def _measure_costs(self, drafter: DrafterModel) -> Costs:
        return calibrate.costs(self.target, drafter, self.exactness, self.context_window, self.walker)

    # --- prompts ------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, reasoning: str | None = None) -> list[int]:
        """Token ids of a prompt; `reasoning` as for `stream`.

        Raises:
            UsageError: the prompt is empty, or is none of text, token ids and messages.
        """
        return list(encode(prompt, self.tokenizer, self.target.vocab_size, reasoning).ids)

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
        rendered = encode(prompt, self.tokenizer, self.target.vocab_size, reasoning, variables, tools)
        check_bias(params, self.target.vocab_size)
        return Prepared(
            rendered.ids,
            rendered.turns,
            rendered.thinking,
            params,
            self._block_sizes.checked(block_size),
            speculative,
            self._max_tokens(rendered.ids, params),
        )

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
        policy = self._block_sizes.policy(request.block_size) if request.speculative else PLAIN
        sampler = Sampler(params, request.ids, self.target.vocab_size, self._known_ids)
        reply = Reply(self.tokenizer, eos=self._eos, stop=tuple(params.stop), thinking=request.thinking)
        self._cancelled.clear()
        return self._events(request, sampler, reply, policy)

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
    def block_size(self) -> int | None:
        """Rows of a verify pass where a request names none; None: chosen for every cycle."""
        return self._block_sizes.default

    @property
    def largest_block(self) -> int:
        """Rows of the block that the drafter was trained for; 1 without a drafter."""
        return self._block_sizes.largest

    @property
    def costs(self) -> Costs:
        """What cycles cost on this machine: remembered, or measured when first asked for, in some seconds.

        Raises:
            UsageError: there is no drafter.
        """
        self._check_thread()
        return self._block_sizes.costs

    def fallbacks_at(self, block_size: int | None) -> tuple[str, ...]:
        """`fallbacks`, and where a block size is to be chosen (None) why none can ever pay, if so."""
        why = self._block_sizes.why_plain(block_size)
        return self.fallbacks if why is None else (*self.fallbacks, why)

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

    def _events(self, request: Prepared, sampler: Sampler, reply: Reply, policy: Policy) -> Iterator[Event]:
        self._check_thread()
        ids, written = request.ids, list[int]()
        network = None if policy == PLAIN else self.drafter
        with memory_errors(), self._resumed(ids, drafted=network is not None) as context:
            self._spare_memory(len(ids), len(ids))
            drafter = None if network is None else Drafter(network, self.walker, context.drafter)
            events = decode(
                self.target,
                context.caches,
                ids,
                sampler,
                drafter=drafter,
                policy=policy,
                max_tokens=request.max_tokens,
                take=reply.take,
                prefill_step=self.prefill_step,
                cancelled=self._cancelled.is_set,
                done=len(context.tokens),
                stops=(*request.turns, *context.partings) if self._prefixes and context.needs_marks else (),
                reached=lambda rows: context.note(ids[:rows]),
            )
            try:
                with closing(events):
                    for event in events:
                        written += event.tokens
                        yield self._told(event, reply, request)
                        self._check_thread()
                        self._spare_memory(len(ids) + len(written), len(event.tokens))
            finally:
                if written:
                    context.note([*ids, *written[:-1]])

    def _told(self, event: Event, reply: Reply, request: Prepared) -> Event:
        """An event with the texts of its tokens."""
        text, thought = reply.finish() if isinstance(event, Finished) else reply.drain()
        event = replace(event, text=text, reasoning=thought)
        if isinstance(event, Prefilled) and self.drafter is not None and request.speculative:
            return replace(event, fallbacks=self.fallbacks_at(request.block_size))
        return event

    # --- earlier prompts --------------------------------------------------------------------------

    def _resumed(self, ids: tuple[int, ...], *, drafted: bool) -> AbstractContextManager[Context]:
        """What is known of this prompt already; what the reply adds to it stays for the next."""
        if self._prefixes is None:
            return nullcontext(self._new_context(drafted))
        return self._prefixes.resumed(ids, drafted=drafted)

    def _new_context(self, drafted: bool) -> Context:
        network = self.drafter if drafted else None
        return Context(self.target.make_cache(), None if network is None else network.make_context())

    def _spare_memory(self, rows: int, new: int) -> None:
        """Now and then, give the memory of earlier prompts to a context that grows."""
        if self._prefixes and self._spare and (rows // CLEAR_EVERY > (rows - new) // CLEAR_EVERY):
            self._prefixes.fit(self._spare(rows + CLEAR_EVERY))

    @property
    def _eos(self) -> frozenset[int]:
        return frozenset(int(token) for token in self.tokenizer.eos_token_ids)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThreadError(
                "this session belongs to the thread that loaded it: MLX's arrays and streams cannot cross "
                "threads; run it there, and call only cancel() from elsewhere"
            )

    def _max_tokens(self, ids: Sequence[int], params: SamplingParams) -> int | None:
        limit = self.context_window
        if limit is None:
            return params.max_tokens
        left = limit - len(ids)
        if left < 1:
            what = f"{limit} tokens; shorten the prompt"
            if limit == self.room:
                what = f"{limit} tokens here, for want of memory; shorten the prompt, or use fewer bits"
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens: this model's maximum context length is {what}"
            )
        return left if params.max_tokens is None else min(left, params.max_tokens)

"""A loaded pair: prompts in, events out. Owns the tokenizer; everything below knows token ids only."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from dflash_mlx import calibrate, hub
from dflash_mlx.chat_template import render
from dflash_mlx.decode import Proposer, decode
from dflash_mlx.drafter import Drafter, DrafterModel, load_drafter
from dflash_mlx.errors import PairError, UsageError, WrongThreadError, memory_errors
from dflash_mlx.events import Event, Finished
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.params import SamplingParams
from dflash_mlx.result import Result, collect
from dflash_mlx.sampling import Sampler
from dflash_mlx.schedule import Adaptive, Costs, Fixed, Policy
from dflash_mlx.target import Target, load_target
from dflash_mlx.target.exactness import EXACT, measure_exactness
from dflash_mlx.target.load import Tokenizer
from dflash_mlx.text import Reply, Thinking

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text (taken raw), token ids, or chat messages."""


class Session:
    """A target, its tokenizer and, unless it only decodes plainly, the drafter made for it.

    Everything of MLX belongs to the thread that made the session; `cancel` may be called from any.

    Attributes:
        target: the target.
        tokenizer: mlx-lm's tokenizer wrapper.
        drafter: the drafter network, or None.
        notes: what the user should know about how the pair was loaded.
        exactness: "exact" if speculation cannot change a token on this machine, else what differs.
        prefill_step: prompt rows per forward pass, speculating or not.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        drafter: DrafterModel | None = None,
        *,
        notes: tuple[str, ...] = (),
        prefill_step: int = 2048,
    ) -> None:
        if prefill_step < 1:
            raise UsageError(f"prefill_step is {prefill_step}: it must be a positive integer")
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.notes = notes
        self.prefill_step = prefill_step
        self.exactness = EXACT
        self._cancelled = threading.Event()
        self._owner = threading.get_ident()
        self._known_ids = 1 + max(tokenizer.get_vocab().values())
        if drafter is not None:
            layer_ids = drafter.config.target_layer_ids
            target.check_fit(drafter.config)
            target.attach(layer_ids)
            sizes = range(2, drafter.config.block_size + 1)
            self.exactness = measure_exactness(target, sizes, layer_ids)

    # --- prompts ------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, reasoning: str | None = None) -> list[int]:
        """Token ids of a prompt; `reasoning` as for `stream`.

        Raises:
            UsageError: the prompt is empty, or is none of text, token ids and messages.
        """
        return self._encode(prompt, reasoning)[0]

    def _encode(self, prompt: Prompt, reasoning: str | None) -> tuple[list[int], Thinking | None]:
        thinking = None
        if prompt and _all(prompt, Mapping):
            messages = [dict(cast(Mapping[str, Any], message)) for message in prompt]
            rendered = render(self.tokenizer, messages, reasoning=reasoning)
            ids, thinking = list(rendered.ids), rendered.thinking
        elif reasoning is not None:
            raise UsageError(f"reasoning is {reasoning!r}: it needs messages, a raw prompt has no template")
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
            block_size: rows of a verify pass, 1 to the drafter's own; None: for each cycle the size that is
                fastest here and for this text, by what earlier cycles showed.
            speculative: False decodes plainly, which gives the same tokens.
            reasoning: off, on, low, medium, high or xhigh, where the model's template offers it; None:
                the model's default.

        Raises:
            UsageError: an argument cannot be honoured; nothing was computed.
            NumericsError: a model produced NaN or infinity.
            WrongThreadError: the session belongs to another thread.
        """
        self._check_thread()
        params = params or SamplingParams()
        ids, thinking = self._encode(prompt, reasoning)
        max_tokens = self._max_tokens(ids, params)
        policy = self._policy(block_size, speculative=speculative)
        sampler = Sampler(params, ids, self.target.vocab_size, self._known_ids)
        reply = Reply(self.tokenizer, eos=self._eos, stop=tuple(params.stop), thinking=thinking)
        drafter = Drafter(self.drafter) if self.drafter is not None and speculative else None
        self._cancelled.clear()
        return self._events(ids, sampler, reply, drafter, policy, max_tokens)

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

    def close(self) -> None:
        """Leave the target model as mlx-lm loaded it."""
        self.target.detach()

    def _events(
        self,
        ids: list[int],
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
        with memory_errors():
            for event in events:
                text, thought = reply.finish() if isinstance(event, Finished) else reply.drain()
                yield replace(event, text=text, reasoning=thought)
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
        limit = self.target.context_length
        if limit is None:
            return params.max_tokens
        left = limit - len(ids)
        if left < 1:
            raise UsageError(
                f"the prompt has {len(ids)} tokens: this model's maximum context length is {limit} tokens"
            )
        return left if params.max_tokens is None else min(left, params.max_tokens)

    def _policy(self, block_size: int | None, *, speculative: bool) -> Policy:
        if block_size is None:
            return self._adaptive if speculative and self.drafter is not None else Fixed(1)
        trained = self.largest_block
        if not 1 <= block_size <= trained:
            made_for = (
                "there is no drafter" if self.drafter is None else f"the drafter was trained for {trained}"
            )
            raise UsageError(f"block_size is {block_size}: it must be between 1 and {trained} ({made_for})")
        return Fixed(block_size)

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
    dequantize: bool = False,
    prefill_step: int = 2048,
) -> Session:
    """Load a pair.

    Args:
        target: folder or hub id of an mlx-lm model; None: the embedded target.
        drafter: folder or hub id of a DFlash drafter; None: the one known for this target; "none": plain.
        revision, draft_revision: branch, tag or commit on the hub.
        draft_bits: quantize the drafter's linear layers to 4 or 8 bits.
        dequantize: turn a quantized target into float32.
        prefill_step: prompt rows per forward pass.

    Raises:
        ModelError: a model cannot be found, read, or used, or the two do not belong together.
        UsageError: an argument is out of range.
    """
    if draft_bits not in (None, 4, 8):
        raise UsageError(f"draft_bits is {draft_bits!r}: it must be 4 or 8")
    folder = hub.resolve(target or EMBEDDED.target, revision)
    if drafter is None:
        if folder.resolve() != hub.resolve(EMBEDDED.target).resolve():
            raise PairError(f"no drafter is known for {target}; name one, or pass 'none' to decode plainly")
        drafter = EMBEDDED.drafter
    # The drafter first: it is small, and what is wrong with it is known before the target is read.
    network = (
        None if drafter == "none" else load_drafter(hub.resolve(drafter, draft_revision), bits=draft_bits)
    )
    with memory_errors():
        loaded = load_target(folder, dequantize=dequantize)
        return Session(
            loaded.target, loaded.tokenizer, network, notes=loaded.notes, prefill_step=prefill_step
        )

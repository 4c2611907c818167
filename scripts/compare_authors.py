"""Our decode loop against the authors' MLX implementation: same weights and prompts, interleaved.

    .venv/bin/python scripts/compare_authors.py          # after make test, which installs dflash==0.1.0

On Linux, preload an OpenBLAS to compare with matrix products at a realistic share of the time:

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0 .venv/bin/python scripts/...
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dflash.model_mlx as authors
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import SamplingParams, load
from dflash_mlx.drafter import Drafter
from dflash_mlx.pairs import DEMO, EMBEDDED
from dflash_mlx.target import load_target


@dataclass(frozen=True)
class Run:
    """One reply: its tokens, verify cycles, and seconds from the first token to the last."""

    tokens: list[int]
    cycles: int
    seconds: float


def main() -> int:
    """Prints medians over the prompts; returns 1 if the two disagree on a token."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", default=EMBEDDED.target)
    parser.add_argument("--drafter", default=EMBEDDED.drafter)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    prompts: list[str] = json.loads((DEMO / "held_out.json").read_text(encoding="utf-8"))

    session = load(args.target, args.drafter, dequantize=True)
    ids = [session.encode(p) for p in prompts]
    theirs = Theirs(args.target, args.drafter)

    def run_ours(prompt: list[int]) -> Run:
        params = SamplingParams(max_tokens=args.max_tokens)
        result = session.generate(prompt, params, block_size=args.block_size)
        return Run(list(result.tokens), len(result.cycles), result.decode_seconds)

    def run_theirs(prompt: list[int]) -> Run:
        return theirs.run(prompt, args.block_size, args.max_tokens)

    equal, ratios, ours_ms, theirs_ms = True, [], [], []
    for turn in range(args.rounds):
        for number, prompt in enumerate(ids):
            order: list[Callable[[list[int]], Run]] = [run_ours, run_theirs]
            runs = {f: f(prompt) for f in (order if (turn + number) % 2 else order[::-1])}
            a, b = runs[run_ours], runs[run_theirs]
            equal &= a.tokens == b.tokens
            if turn:  # the first round warms up
                ratios.append((len(a.tokens) / a.seconds) / (len(b.tokens) / b.seconds))
                ours_ms.append(1e3 * a.seconds / a.cycles)
                theirs_ms.append(1e3 * b.seconds / b.cycles)
    forward_ours = our_forwards(session, ids[0], args.block_size)
    forward_theirs = theirs.forwards(ids[0], args.block_size)
    print(f"{len(ratios)} interleaved pairs of replies, block {args.block_size}; medians")
    for name, cycle, forward in (
        ("ours", statistics.median(ours_ms), forward_ours),
        ("authors", statistics.median(theirs_ms), forward_theirs),
    ):
        print(
            f"{name:8} {cycle:.2f} ms per cycle: {forward:.2f} in the forwards, {cycle - forward:.2f} outside"
        )
    ratios.sort()
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    middle = statistics.median(ratios)
    print(f"tokens/s, ours over the authors': {middle:.2f} (80% of pairs in {low:.2f}..{high:.2f})")
    print("token ids are identical" if equal else "token ids DIFFER")
    return 0 if equal else 1


def our_forwards(session: Any, prompt: list[int], block_size: int, repeats: int = 40) -> float:
    """Milliseconds of one draft pass and one verify pass, each waited for, after this prompt."""
    target, drafter, caches = session.target, Drafter(session.drafter), session.target.make_cache()
    _, taps = target.forward(mx.array(prompt), caches)
    drafter.extend(taps)
    block = mx.array([prompt[-1]] * block_size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(drafter.propose(prompt[-1], block_size, target.embed, target.head).tokens)
        logits, taps = target.verify(block, caches)
        mx.eval(mx.argmax(logits, axis=-1), taps)
        times.append(time.perf_counter() - start)
        target.commit(0, block_size)
    return 1e3 * statistics.median(times)


class Theirs:
    """The authors' loop on a target and drafter of its own, in the same type."""

    def __init__(self, target: str, drafter: str) -> None:
        loaded = load_target(Path(target), dequantize=True)
        self.model, self.tokenizer = loaded.target.model, loaded.tokenizer
        authors.snapshot_download = lambda folder, **_: folder  # it knows hub ids only
        self.draft = authors.load_draft(drafter)
        self.draft.set_dtype(mx.float32)
        mx.eval(self.draft.parameters())

    def run(self, prompt: list[int], block_size: int, max_tokens: int) -> Run:
        """One greedy reply."""
        tokens: list[int] = []
        cycles, first, last = 0, 0.0, 0.0
        for response in authors.stream_generate(
            self.model,
            self.draft,
            self.tokenizer,
            mx.array(prompt),
            block_size=block_size,
            max_tokens=max_tokens,
        ):
            last = time.perf_counter()
            first = first or last
            tokens += response.tokens
            cycles += response.accepted is not None
        return Run(tokens, cycles, last - first)

    def forwards(self, prompt: list[int], block_size: int, repeats: int = 40) -> float:
        """As `our_forwards`; one committed row is taken in per draft, as in their loop."""
        caches, context = make_prompt_cache(self.model), make_prompt_cache(self.draft)
        self.model(mx.array([prompt]), caches)
        hidden = mx.concatenate(self.model._hidden_states, axis=-1)
        block = mx.array([[prompt[-1]] + [self.draft.config.mask_token_id] * (block_size - 1)])
        verify = mx.array([[prompt[-1]] * block_size])
        self.draft.propose(block, hidden, context, 0.0, logits_start=1)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            tokens, _, _ = self.draft.propose(block, hidden[:, :1], context, 0.0, logits_start=1)
            mx.eval(tokens)
            logits = self.model(verify, caches)
            hidden = mx.concatenate(self.model._hidden_states, axis=-1)
            mx.eval(mx.argmax(logits, axis=-1), hidden)
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m dflash_mlx.generate "prompt"`: one reply, text on stdout, statistics on stderr."""

import argparse
import io
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from dflash_mlx import __version__
from dflash_mlx.chat_template import LEVELS
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.events import Event
from dflash_mlx.loading import load
from dflash_mlx.options import add_block_size, add_pair_options, given, pair_settings
from dflash_mlx.params import SamplingParams
from dflash_mlx.progress import progress_line
from dflash_mlx.remote import Server
from dflash_mlx.result import Result, collect
from dflash_mlx.session import Session
from dflash_mlx.target.exactness import EXACT
from dflash_mlx.terminal import printable
from dflash_mlx.text import whole

INTERRUPTED = 130
UNREAD = 1


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(prog="python -m dflash_mlx.generate", description="One reply to one prompt.")
    p.add_argument("prompt", nargs="?", default="-", help="the prompt; - (default) reads standard input")
    add_pair_options(p)
    add_block_size(p)
    p.add_argument("--max-tokens", type=int, help="tokens of the reply (default: what the context leaves)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument(
        "--top-p", type=float, default=1.0, help="keep the most probable tokens of this total mass"
    )
    p.add_argument("--top-k", type=int, default=0, help="keep this many tokens; 0 (default) keeps all")
    p.add_argument("--min-p", type=float, default=0.0, help="keep tokens this probable relative to the best")
    p.add_argument("--seed", type=int, help="the same seed and settings give the same text (default: drawn)")
    p.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    p.add_argument("--system", help="system message before the prompt")
    p.add_argument("--reasoning", choices=LEVELS, help="how much to think (default: the model's own)")
    p.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    p.add_argument("--plain", action="store_true", help="decode without speculation: the same tokens, slower")
    p.add_argument("--stats", action="store_true", help="also print a line for every verify cycle")
    p.add_argument("--base-url", help="ask an OpenAI-compatible server instead, such as http://host:port/v1")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text and statistics")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    p.add_argument("--version", action="version", version=__version__)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if nobody reads the reply to its end; 2 for a bad argument or prompt; 3 for a model that cannot
        be used; 4 without enough memory; 130 if interrupted.
    """
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Else Python would say so once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except DFlashError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    text = whole(_read_input() if args.prompt == "-" else args.prompt)
    if not text:
        raise UsageError("the prompt is empty: pass it as an argument or on standard input")
    if args.raw and (args.system or args.reasoning):
        raise UsageError("--raw takes the prompt as it is: leave out --system and --reasoning")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
    )
    if args.base_url:
        return _ask(args, text)
    if args.plain and args.draft is None:
        args.draft = "none"  # a drafter would only take memory
    session = load(**pair_settings(args), progress=progress_line(sys.stderr))
    events = session.stream(
        text if args.raw else _messages(args.system, text),
        params,
        block_size=None if args.plain else args.block_size,
        speculative=not args.plain,
        reasoning=args.reasoning,
    )
    if not args.json:
        for note in session.notes:
            print(note, file=sys.stderr)
        events = _printed(events)
    with _interruptible(session):
        result = collect(events)
    if args.json:
        print(json.dumps(to_json(result, session.exactness, session.notes)))
    else:
        print(flush=True)
        for line in _cycles(result) if args.stats else []:
            print(line, file=sys.stderr)
        print(statistics(result, session.exactness), file=sys.stderr)
        if args.temperature:
            print(f"seed {result.seed}", file=sys.stderr)
    return INTERRUPTED if result.finish_reason == "cancelled" else 0


def _read_input() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # without a locale, Python lets bytes that are no text pass
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on standard input is not text: {error}") from error


LOCAL = ("block_size", "raw", "plain", "stats")
"""What only a model loaded here can honour, besides the pair's options."""


def _ask(args: argparse.Namespace, text: str) -> int:
    """One reply of a server."""
    unusable = [f"--{name.replace('_', '-')}" for name in LOCAL if getattr(args, name)]
    if unusable := [*given(args, but="model"), *unusable]:
        raise UsageError(f"{unusable[0]} cannot be used with --base-url")
    wanted = {"max_tokens": args.max_tokens, "seed": args.seed, "stop": args.stop or None}
    changed = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    settings = {
        "temperature": args.temperature,
        **{name: value for name, value in wanted.items() if value is not None},
        **{name: getattr(args, name) for name, usual in changed.items() if getattr(args, name) != usual},
        **({"reasoning_effort": args.reasoning} if args.reasoning else {}),
    }
    show = (lambda *_: None) if args.json else _show
    answer = Server(args.base_url, args.model).ask(_messages(args.system, text), settings, show)
    if args.json:
        print(json.dumps(asdict(answer)))
        return 0
    speed = f"{answer.tokens} tokens at {answer.tokens_per_second:.1f} tokens/s"
    print(f"\n{speed}, the first after {answer.first_seconds:.2f} s", file=sys.stderr)
    return 0


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _printed(events: Iterator[Event]) -> Iterator[Event]:
    """Print the answer as it comes; thinking goes to standard error, so that a pipe gets the answer alone."""
    for event in events:
        _show(event.text, event.reasoning)
        yield event


def _show(answer: str, reasoning: str) -> None:
    for stream, text in ((sys.stderr, reasoning), (sys.stdout, answer)):
        # A terminal obeys what a model writes, a file does not.
        stream.write(printable(text) if stream.isatty() else text)
        stream.flush()


@contextmanager
def _interruptible(session: Session) -> Iterator[None]:
    """Ctrl+C ends the reply after its current block, and what was said stays; a second one ends all at once.

    An exception instead could come up anywhere, also where Python can only ignore it.
    """

    def cancel(*_: object) -> None:
        session.cancel()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _cycles(result: Result) -> Iterator[str]:
    """A line for every verify cycle."""
    for number, cycle in enumerate(result.cycles, 1):
        drafts = f"{'copied' if cycle.copied else 'drafted'} {cycle.drafted}"
        counts = f"accepted {cycle.accepted}, committed {cycle.committed}"
        yield f"cycle {number}: {drafts}, {counts}, {1e3 * cycle.seconds:.1f} ms"


def statistics(result: Result, exactness: str) -> str:
    """What a person wants to know about a reply, in a few lines."""
    lines = [
        f"prompt {result.prompt_tokens} tokens at {result.prefill_tokens_per_second:.1f} tokens/s, "
        f"reply {len(result.tokens)} tokens at {result.decode_tokens_per_second:.1f} tokens/s "
        f"({result.finish_reason}), peak memory {peak_memory() / 1e9:.2f} GB"
    ]
    lines += [*result.fallbacks] if exactness == EXACT else [*result.fallbacks, exactness]
    if result.tau is not None:
        lines.append(f"tau {result.tau:.2f} tokens per verify cycle, the target's own included")
        counts = Counter(cycle.committed for cycle in result.cycles if cycle.drafted)
        widest = max(counts.values())
        lines += [
            f"  {size} {'█' * round(30 * counts[size] / widest):30} {counts[size]}"
            for size in range(1, max(counts) + 1)
        ]
        if copied := sum(cycle.copied for cycle in result.cycles):
            lines.append(f"{copied} of {counts.total()} blocks were copied from the context")
    return "\n".join(lines)


def to_json(result: Result, exactness: str, notes: Sequence[str]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "text": result.text,
        "reasoning": result.reasoning,
        "seed": result.seed,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "exactness": exactness,
        "notes": list(notes),
        "fallbacks": list(result.fallbacks),
        "prompt_tokens": result.prompt_tokens,
        "tau": result.tau,
        "cycles": [
            {
                "drafted": c.drafted,
                "accepted": c.accepted,
                "committed": c.committed,
                "copied": c.copied,
            }
            for c in result.cycles
        ],
        "timings": {
            "prefill_seconds": result.prefill_seconds,
            "decode_seconds": result.decode_seconds,
            "prefill_tokens_per_second": result.prefill_tokens_per_second,
            "decode_tokens_per_second": result.decode_tokens_per_second,
            "peak_memory_bytes": peak_memory(),
        },
    }


def peak_memory() -> int:
    """Bytes that MLX held at most in this process."""
    return mx.get_peak_memory()


if __name__ == "__main__":
    sys.exit(main())

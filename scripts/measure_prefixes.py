"""Measure what a kept prefix saves: the time to the first token of a long prompt, cold and repeated.

    python scripts/measure_prefixes.py [--tokens 3900] [--rounds 5]

Starts a server with the embedded pair. Every round has instructions of its own, as agents send them, and
two questions after them, so each cold prompt has its warm one right after it.
"""

import argparse
import statistics
import sys
import time

import httpx
from measure_endpoint import served

LINE = "def f{number:05d}(a, b):\n    return a * {number:05d} + b\n"
LIMIT = 0.1


def main() -> int:
    """Print the ratios; 1 if the median is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3900, help="of the prefix, about (default: 3900)")
    parser.add_argument("--rounds", type=int, default=5, help="cold and warm prompts (default: 5)")
    args = parser.parse_args()
    with served() as (_, url), httpx.Client(base_url=url, timeout=600) as client:
        first_token(client, LINE, "def first(")
        ratios = []
        for number in range(args.rounds):
            prefix = text(client, args.tokens, 1000 * number)
            cold, none, _ = first_token(client, prefix, "def cold(")
            warm, cached, tokens = first_token(client, prefix, "def warm(")
            assert none < 100, "this text was not new"
            ratios.append(warm / cold)
            print(
                f"prompt {tokens} tokens, {cached} cached: {cold:.2f} s cold, {warm:.3f} s warm, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    middle = statistics.median(ratios)
    print(f"time to the first token, warm to cold: {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return int(middle > LIMIT)


def text(client: httpx.Client, tokens: int, start: int) -> str:
    """About so many tokens that no other call gives."""
    lines = [LINE.format(number=start + i) for i in range(100)]
    usage = client.post("/completions", json={"prompt": "".join(lines), "max_tokens": 1}).json()["usage"]
    count = tokens * len(lines) // usage["prompt_tokens"]
    return "".join(LINE.format(number=start + 500 + i) for i in range(count))


def first_token(client: httpx.Client, instructions: str, question: str) -> tuple[float, int, int]:
    """Seconds until the first token, tokens that were cached, and tokens of the prompt."""
    contents = {"system": instructions, "user": question}
    body = {
        "messages": [{"role": role, "content": content} for role, content in contents.items()],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "include_dflash": True},
    }
    start, seconds, usage = time.perf_counter(), 0.0, ""
    with client.stream("POST", "/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not seconds and '"prefilled"' in line:
                seconds = time.perf_counter() - start
            if '"usage"' in line:
                usage = line
    figures = httpx.Response(200, text=usage.removeprefix("data: ")).json()["usage"]
    return seconds, figures["prompt_tokens_details"]["cached_tokens"], figures["prompt_tokens"]


if __name__ == "__main__":
    sys.exit(main())

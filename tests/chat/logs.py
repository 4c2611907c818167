"""Event logs: what the server sends for a reply, as SSE chunks, composed.

A log splits a text into word-like tokens and draws how many of each block are accepted, from a seed.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

Chunk = dict[str, Any]

PROSE = """196 factors as 2² × 7², so the number of divisors is the product of one more than each exponent:

- exponents of 2: 0, 1, 2
- exponents of 7: 0, 1, 2

So there are **3 × 3 = 9** divisors: `1, 2, 4, 7, 14, 28, 49, 98` and `196`. See
[divisor function](https://en.wikipedia.org/wiki/Divisor_function) for more.
"""
CODE = """Count them by trial:

```python
def divisors(n: int) -> list[int]:
    \"\"\"All positive divisors of n, in order.\"\"\"
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    large = [n // d for d in reversed(small) if d * d != n]
    return small + large


print(len(divisors(196)))  # 9
```

It takes about √n steps.
"""
LONG_LIST = (
    "Here they are:\n\n" + "".join(f"{n}. item number {n} of the list\n" for n in range(1, 61)) + "\nDone.\n"
)
REASONING = "The user asks for divisors.\n\n196 = 14², and 14 = 2 × 7, so 196 = 2² × 7².\n"
HOSTILE = (
    "closing [/b] and [bold red]tags[/] and [@click=app.quit]click[/]\n\n"
    "an escape \x1b]52;c;ZXZpbA==\x07 and \x1b[31mred\x1b[0m and \x9b31m\n\n"
    "right to left \u202eevil\u202c and שלום, emoji 👩‍👩‍👧 🏳️‍🌈, a null \x00 and a bell \x07\n\n"
    "<script>alert(1)</script>\n\n" + "x" * 5000 + "\n\n[link]('); app.quit(') [b](javascript:alert(1))\n"
)


def ten_thousand_lines() -> str:
    """A reply that no one reads."""
    return "```\n" + "".join(f"line {n}\n" for n in range(10_000)) + "```\n"


def pieces(text: str) -> list[str]:
    """Word-like tokens; joined they are the text."""
    return re.findall(r"\s?\w+|\s?[^\w\s]+|\s", text)


def compose(
    text: str,
    reasoning: str = "",
    *,
    block: int = 5,
    seed: int = 0,
    prompt_tokens: int = 24,
    finish: str = "stop",
    first_delta: Chunk | None = None,
    seconds: float = 0.025,
) -> list[Chunk]:
    """The chunks of a reply to a client that asked for everything."""
    draw = random.Random(seed)
    tokens = [(piece, "reasoning_content") for piece in pieces(reasoning)]
    tokens += [(piece, "content") for piece in pieces(text)]
    chunks = [chunk(first_delta if first_delta is not None else {"role": "assistant", "content": ""})]
    chunks.append(chunk({}, {"phase": "queued", "ahead": 1}))
    steps = (0, prompt_tokens // 2, prompt_tokens)
    chunks += [chunk({}, {"phase": "prefill", "done": done, "total": prompt_tokens}) for done in steps]
    first = {
        "phase": "prefilled",
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0,
        "seconds": 0.31,
        "seed": 1,
    }
    chunks.append(said(tokens[:1], {**first, "tokens": [shown(tokens[0][0], "target")]}))
    at, cycles, total = 1, 0, 0
    while at < len(tokens):
        kept = min(sum(draw.random() < 0.75 for _ in range(block - 1)), len(tokens) - at - 1)
        some = tokens[at : at + kept + 1]
        facts = {
            "phase": "block",
            "drafted": block - 1,
            "accepted": kept,
            "copied": cycles % 6 == 5,
            "seconds": seconds,
            "wait_seconds": seconds / 2,
            "tokens": [shown(piece, "draft" if i < kept else "target") for i, (piece, _) in enumerate(some)],
            "rejected": [{"id": 0, "text": " no"}] * (block - 1 - kept),
        }
        chunks.append(said(some, facts))
        at, cycles, total = at + kept + 1, cycles + 1, total + kept + 1
    chunks.append(chunk({}, {"phase": "finished", "finish_reason": finish}, finish))
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens), "total_tokens": 0}
    timings = {"predicted_ms": 1e3 * cycles * seconds, "predicted_n": len(tokens)}
    tau = {"tau": total / cycles if cycles else None, "cycles": cycles}
    chunks.append({"choices": [], "usage": usage, "timings": timings, "dflash": tau})
    return chunks


def chunk(delta: Chunk, facts: Chunk | None = None, finish: str | None = None) -> Chunk:
    """One SSE chunk."""
    body: Chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    body["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return body if facts is None else {**body, "dflash": facts}


def said(tokens: Sequence[tuple[str, str]], facts: Chunk) -> Chunk:
    """A chunk with the text of these tokens."""
    delta: dict[str, str] = {}
    for piece, where in tokens:
        delta[where] = delta.get(where, "") + piece
    return chunk(delta, facts)


def shown(text: str, origin: str) -> Chunk:
    """A token for display."""
    return {"id": 0, "text": text, "origin": origin}


def token_count(chunks: Sequence[Chunk]) -> int:
    """How many tokens the log's reply has."""
    return sum(len(part["dflash"].get("tokens", ())) for part in chunks if "dflash" in part)


def texts(chunks: Sequence[Chunk]) -> Iterator[str]:
    """The pieces of the answer."""
    for part in chunks:
        for choice in part.get("choices", ()):
            if text := choice["delta"].get("content"):
                yield text

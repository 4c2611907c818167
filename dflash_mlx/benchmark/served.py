"""The same prompts against a running server: what a client sees, some requests at a time."""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from dflash_mlx.benchmark import prompts
from dflash_mlx.benchmark.prompts import Task
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.remote import Answer, Server


def run(args: argparse.Namespace) -> int:
    """Ask the server of `--base-url`, print tokens per second and times to the first token."""
    server = Server(args.base_url, args.model)
    tasks = (
        prompts.data_set(args.dataset, args.num_prompts, args.seed)
        if args.dataset
        else prompts.own(args.num_prompts)
    )
    settings = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        **({"top_k": args.top_k} if args.top_k else {}),
        **({"reasoning_effort": args.reasoning} if args.reasoning else {}),
    }
    start = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as pool:
        done = pool.map(lambda task: (task, list(conversation(server, task, settings))), tasks)
        answers = list(tqdm(done, total=len(tasks), unit="prompt", disable=None))
    found = summary(answers, time.perf_counter() - start, args.concurrency, server)
    print(json.dumps(found) if args.json else table(found))
    return 0


def conversation(server: Server, task: Task, settings: dict[str, Any]) -> Iterator[Answer]:
    """The answers to a task's turns.

    Raises:
        UsageError: a turn is empty.
    """
    messages: list[dict[str, str]] = []
    for turn in task.turns:
        if not turn.strip():
            raise UsageError(f"a prompt of the category {task.category} is empty")
        messages.append({"role": "user", "content": turn})
        answer = server.ask(messages, settings)
        yield answer
        messages.append({"role": "assistant", "content": answer.text})


def summary(
    answers: Sequence[tuple[Task, Sequence[Answer]]], seconds: float, concurrency: int, server: Server
) -> dict[str, Any]:
    """The keys of the local benchmark, with None for what a server does not show."""
    by_category: dict[str, list[Answer]] = {}
    for task, replies in answers:
        by_category.setdefault(task.category, []).extend(replies)
    every = [answer for replies in by_category.values() for answer in replies]
    if not all(answer.tokens for answer in every):
        raise DFlashError(
            "the server did not say how many tokens it made: it must report usage in its stream"
        )
    # Over cycles, as the local benchmark's, where the server says how many a reply had.
    taus = [(answer.tau, answer.cycles or 1) for answer in every if answer.tau is not None]
    return {
        "prompts": len(every),
        "concurrency": concurrency,
        "tau": sum(tau * n for tau, n in taus) / sum(n for _, n in taus) if taus else None,
        "speedup": None,
        "hashes_equal": None,
        "tokens_per_second": sum(a.tokens for a in every) / seconds,
        "categories": {name: _speeds(replies) for name, replies in by_category.items()},
        "phases_ms": {"first token": 1e3 * statistics.median(a.first_seconds for a in every)},
        "versions": {"server": server.base_url, "model": server.model},
    }


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{'':10}{'prompts':>9}{'tok/s of a request':>20}{'first token ms':>16}"]
    lines += [
        f"{name:10}{c['prompts']:9}{c['tokens_per_second']:20.1f}{c['first_token_ms']:16.0f}"
        for name, c in found["categories"].items()
    ]
    lines.append(
        f"all: {found['tokens_per_second']:.1f} tokens/s with {found['concurrency']} requests at a time; "
        f"{found['versions']['model']} at {found['versions']['server']}"
    )
    if found["tau"] is not None:
        lines.append(f"tau {found['tau']:.2f}, as the server reports it")
    return "\n".join(lines)


def _speeds(replies: Sequence[Answer]) -> dict[str, Any]:
    return {
        "prompts": len(replies),
        "tokens_per_second": statistics.median(a.tokens_per_second for a in replies),
        "first_token_ms": 1e3 * statistics.median(a.first_seconds for a in replies),
    }

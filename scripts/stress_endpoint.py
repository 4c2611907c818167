"""Twenty clients at once, for minutes: long and short prompts, streamed and whole, some of which leave early.

    python scripts/stress_endpoint.py [--clients 20] [--minutes 5]

Starts a server with the embedded pair. What every prompt is answered with is asked first, one at a time; from
then on each answer must be that, or the beginning of it where the client left. At the end nothing may run or
wait, and memory must be back to where it was after as many requests as there are kept prefixes.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from measure_endpoint import resident, served

LINE = "def f{number}(a):\n    return a + {number}\n"
LINES = (1, 1, 2, 2, 5, 10, 30)
TOKENS = (1, 8, 24, 60)
LEAVES = 0.3
"""The share of requests that are given up too soon, and of those that are given up within the answer."""


@dataclass(frozen=True)
class Question:
    """A prompt, and how long its answer may be."""

    prompt: str
    tokens: int


def main() -> int:
    """Print what became of all requests; 1 if an answer was wrong or memory has grown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20, help="at once (default: 20)")
    parser.add_argument("--minutes", type=float, default=5, help="for so long (default: 5)")
    args = parser.parse_args()
    with (
        served("--prefix-cache", "0.03") as (process, url),
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        right = {question: whole(client, question) for question in questions()}
        before = memory(process, client)
        end = time.monotonic() + 60 * args.minutes
        with ThreadPoolExecutor(args.clients) as pool:
            runs = [pool.submit(one_client, url, right, seed, end) for seed in range(args.clients)]
            outcomes = sum((run.result() for run in runs), Counter())
        wait_until_idle(client)
        whole(client, next(iter(right)))  # the last look at the memory is after a request
        after = memory(process, client)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    print(f"memory: {after[0] - before[0]:+.1f} MB resident, {after[1] - before[1]:+.1f} MB of MLX's")
    return int(outcomes["wrong"] > 0 or outcomes["right"] == 0 or after[1] - before[1] > 30)


def questions() -> list[Question]:
    """Prompts of all sizes; several begin alike."""
    rng = random.Random(0)
    found = []
    for number in range(24):
        lines = [LINE.format(number=rng.randrange(3) + i) for i in range(rng.choice(LINES))]
        found.append(Question(f"{''.join(lines)}def g{number % 7}(", rng.choice(TOKENS)))
    return found


def body(question: Question, *, stream: bool) -> dict[str, object]:
    """A request's."""
    return {"prompt": question.prompt, "max_tokens": question.tokens, "stream": stream}


def whole(client: httpx.Client, question: Question) -> str:
    """The answer, when there is time for it."""
    answer = client.post("/completions", json=body(question, stream=False))
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def one_client(url: str, right: dict[Question, str], seed: int, end: float) -> Counter[str]:
    """Ask one question after the other."""
    rng, outcomes = random.Random(seed), Counter[str]()
    with httpx.Client(base_url=url, timeout=600) as client:
        while time.monotonic() < end:
            question = rng.choice(list(right))
            outcome = ask(client, question, right[question], rng)
            outcomes[outcome] += 1
            if outcome == "told to come back":
                time.sleep(rng.uniform(0.1, 1))
    return outcomes


def ask(client: httpx.Client, question: Question, right: str, rng: random.Random) -> str:
    """What became of one request: some leave after so many seconds, others after so many characters."""
    seconds = rng.choice((0.001, 0.05, 0.5)) if rng.random() < LEAVES else 600
    characters = rng.randrange(8) if rng.random() < LEAVES else None
    stream = rng.random() < 0.7
    timeout = httpx.Timeout(600, read=seconds)
    try:
        with client.stream(
            "POST", "/completions", json=body(question, stream=stream), timeout=timeout
        ) as answer:
            if answer.status_code in (429, 503):
                return "told to come back"
            answer.raise_for_status()
            if stream:
                return streamed(answer, right, characters)
            text = json.loads(answer.read())["choices"][0]["text"]
            return "right" if text == right else "wrong"
    except httpx.TimeoutException:
        return "left before the answer"


def streamed(answer: httpx.Response, right: str, characters: int | None) -> str:
    """The same of a stream."""
    text = ""
    for line in answer.iter_lines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            return "wrong"
        text += "".join(choice["text"] for choice in chunk["choices"])
        if not right.startswith(text):
            return "wrong"
        if characters is not None and len(text) > characters:
            return "left within the answer"
    return "right" if text == right else "wrong"


def wait_until_idle(client: httpx.Client) -> None:
    """Until nothing runs or waits."""
    for _ in range(600):
        queue = client.get("/health").json()["queue"]
        if queue["running"] + queue["waiting"] == 0:
            return
        time.sleep(0.1)
    raise TimeoutError("the queue does not empty")


def memory(process: subprocess.Popen[str], client: httpx.Client) -> tuple[float, float]:
    """MB, resident and of MLX."""
    return resident(process.pid), client.get("/health").json()["memory"]["active"] / 1e6


if __name__ == "__main__":
    sys.exit(main())

"""Other MLX implementations against ours: same weights and prompts, in turns, each in its own environment.

    python scripts/bench_peers.py --peer authors=.venv/bin/python --peer dspark=/path/to/venv/bin/python

An environment needs the package dflash (authors) or mlx-dspark (dspark); with none named, ours runs alone
against plain decoding. On Linux, MLX's wheel links a slow BLAS; with an installed OpenBLAS matrix products
take a realistic share of the time:

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python ...
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reply = dict[str, Any]
"""`tokens`, and the `seconds` from the first of them to the last."""
Ask = Callable[[list[int], int | None, int], Reply]
"""(prompt ids, block size, max tokens) -> reply; None for the size: what an implementation does by itself."""


# --- workers: one process each; they must not import ours --------------------------------------------


def authors(target: str, drafter: str) -> Ask:
    """The package `dflash`."""
    import dflash.model_mlx as theirs
    import mlx.core as mx
    from mlx_lm import load

    theirs.snapshot_download = lambda folder, **_: folder  # it knows hub ids only
    model, tokenizer, *_ = load(target)
    draft = theirs.load_draft(drafter)

    def ask(prompt: list[int], block_size: int | None, max_tokens: int) -> Reply:
        tokens: list[int] = []
        first = last = 0.0
        for response in theirs.stream_generate(
            model, draft, tokenizer, mx.array(prompt), block_size=block_size, max_tokens=max_tokens
        ):
            last = time.perf_counter()
            first = first or last
            tokens += response.tokens
        return {"tokens": tokens, "seconds": last - first}

    return ask


def dspark(target: str, drafter: str) -> Ask:
    """The package `mlx-dspark`, with its defaults for a library call."""
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    model, tokenizer = load_target(target, require_tap=True)
    draft, _ = load_dflash(drafter, quantize=False)

    def ask(prompt: list[int], block_size: int | None, max_tokens: int) -> Reply:
        result = dflash_generate(
            model,
            tokenizer,
            draft,
            prompt_ids=prompt,
            max_new_tokens=max_tokens,
            max_draft_tokens=None if block_size is None else block_size - 1,
        )
        return {"tokens": list(result.token_ids), "seconds": result.decode_seconds}

    return ask


def ours(target: str, drafter: str, *, speculative: bool = True) -> Ask:
    """This repository."""
    from dflash_mlx import SamplingParams, load

    session = load(target, drafter)

    def ask(prompt: list[int], block_size: int | None, max_tokens: int) -> Reply:
        params = SamplingParams(max_tokens=max_tokens)
        result = session.generate(prompt, params, block_size=block_size, speculative=speculative)
        return {"tokens": list(result.tokens), "seconds": result.decode_seconds}

    return ask


def plain(target: str, drafter: str) -> Ask:
    """Plain decoding of this repository."""
    return ours(target, drafter, speculative=False)


WORKERS = {"ours": ours, "plain": plain, "authors": authors, "dspark": dspark}


def work(name: str, target: str, drafter: str) -> None:
    """Answer requests from standard input, a line of JSON each."""
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    ask = WORKERS[name](target, drafter)
    for line in sys.stdin:
        print(json.dumps(ask(*json.loads(line))), file=out, flush=True)


# --- the comparison -------------------------------------------------------------------------------


class Worker:
    """A process that answers requests."""

    def __init__(self, name: str, python: str, models: tuple[str, str]) -> None:
        command = [python, __file__, "--worker", name, *models]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *request: Any) -> Reply:
        """The reply; raises RuntimeError if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended; its message is above")
        reply: Reply = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process by ending its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> int:
    """Prints ratios; returns 1 if ours and plain decoding disagree on a token."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="authors, dspark")
    parser.add_argument("--pair", choices=tuple(PAIRS), default="embedded")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, help="for all (default: what each does by itself)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--worker", nargs=3, metavar=("NAME", "TARGET", "DRAFTER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return 0
    peers = dict(peer.split("=", 1) for peer in args.peer)
    with tempfile.TemporaryDirectory() as folder:
        prompts = PAIRS[args.pair](args.prompts)
        models = full_precision(args.pair, Path(folder))
        pythons = {"ours": sys.executable, "plain": sys.executable, **peers}
        workers = {name: Worker(name, python, models[name in peers]) for name, python in pythons.items()}
        try:
            replies = interleave(workers, prompts, args.block_size, args.max_tokens)
        finally:
            for worker in workers.values():
                worker.close()
    return show(replies, args.block_size)


def code_prompts(count: int) -> list[list[int]]:
    """Python to complete, for the embedded pair."""
    from mlx_lm.utils import load_tokenizer

    from dflash_mlx.benchmark.prompts import completions
    from dflash_mlx.pairs import EMBEDDED

    tokenizer = load_tokenizer(Path(EMBEDDED.target))
    return [tokenizer.encode(task.turns[0]) for task in completions(count)]


def chat_prompts(count: int) -> list[list[int]]:
    """Code, mathematics, chat and prose in turns, for SmolLM2."""
    from mlx_lm.utils import load_tokenizer

    from dflash_mlx.benchmark.prompts import OWN
    from dflash_mlx.chat_template import render

    tokenizer = load_tokenizer(Path(pair("smollm2")[0]))
    texts = [text for alike in zip(*OWN.values(), strict=True) for text in alike][:count]
    return [list(render(tokenizer, [{"role": "user", "content": text}]).ids) for text in texts]


PAIRS = {"embedded": code_prompts, "smollm2": chat_prompts}
"""What each pair is asked."""


def pair(name: str) -> tuple[str, str]:
    """Folders of a pair's target and drafter, as they come."""
    from dflash_mlx import pairs, smollm2

    if name == "embedded":
        return pairs.EMBEDDED.target, pairs.EMBEDDED.drafter
    if smollm2.default_pair() is not pairs.SMOLLM2:
        raise SystemExit(f"SmolLM2 is not here: {smollm2.INSTALL}")
    return smollm2.default_target()[0], pairs.SMOLLM2.drafter


def full_precision(name: str, folder: Path) -> tuple[tuple[str, str], tuple[str, str]]:
    """A pair in float32, and the same in the form that every implementation reads: without a draft head."""
    target, drafter = pair(name)
    ours, theirs = folder / "drafter", folder / "headless"
    float_target(target, folder / "target")
    float_drafter(drafter, ours, draft_head=True)
    float_drafter(drafter, theirs, draft_head=False)
    return (str(folder / "target"), str(ours)), (str(folder / "target"), str(theirs))


def float_target(source: str, folder: Path) -> None:
    """A target's folder with weights in float32."""
    import shutil

    import mlx.core as mx
    from mlx.utils import tree_flatten

    from dflash_mlx.target import load_target

    shutil.copytree(source, folder)
    weights: Any = tree_flatten(load_target(Path(source), dequantize=True).target.model.parameters())
    weights = {name: weight.astype(mx.float32) for name, weight in weights}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config))


def float_drafter(source: str, folder: Path, *, draft_head: bool) -> None:
    """A drafter's folder with weights in float32, and without its draft head unless that is to stay."""
    import shutil

    import mlx.core as mx

    shutil.copytree(source, folder)
    weights: Any = mx.load(str(Path(source) / "model.safetensors"))
    ids = weights.pop("draft_head_ids", None)
    weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    config = json.loads((folder / "config.json").read_text())
    if not draft_head:
        config["dflash_config"].pop("draft_head_size", None)
    elif ids is not None:
        weights["draft_head_ids"] = ids
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))


def interleave(
    workers: dict[str, Worker], prompts: list[list[int]], block_size: int | None, max_tokens: int
) -> dict[str, list[list[Reply]]]:
    """For every implementation two replies to every prompt, in the order A B C C B A, once warm."""
    for worker in workers.values():
        worker.ask(prompts[0], block_size, 16)
    replies: dict[str, list[list[Reply]]] = {name: [] for name in workers}
    for prompt in prompts:
        for name in workers:
            replies[name].append([])
        for name in (*workers, *reversed(workers)):
            replies[name][-1].append(workers[name].ask(prompt, block_size, max_tokens))
    return replies


def show(replies: dict[str, list[list[Reply]]], block_size: int | None) -> int:
    """Print every ratio of tokens per second with its interval, and whose tokens are plain decoding's."""
    from dflash_mlx.interval import Interval

    def speeds(name: str) -> list[float]:
        """Per prompt; the first token comes from the prompt's own pass."""
        return [
            sum(len(r["tokens"]) - 1 for r in pair) / sum(r["seconds"] for r in pair)
            for pair in replies[name]
        ]

    mine = speeds("ours")
    blocks = "each with the blocks of its own choice" if block_size is None else f"block {block_size}"
    print(f"tokens per second, ours over theirs, {blocks}, {len(mine)} prompts, 95 % intervals")
    for name in replies:
        if name == "ours":
            continue
        ratio = Interval.over([a / b for a, b in zip(mine, speeds(name), strict=True)])
        pairs = zip(replies[name], replies["plain"], strict=True)
        same = sum(_agree(theirs[0]["tokens"], reference[0]["tokens"]) for theirs, reference in pairs)
        print(f"  {name:8} {ratio}; plain decoding's tokens in {same} of {len(mine)} replies")
    equal = all(
        a[0]["tokens"] == b[0]["tokens"] for a, b in zip(*map(replies.get, ("ours", "plain")), strict=True)
    )
    print(f"ours: {'the tokens of plain decoding' if equal else 'tokens DIFFER from plain decoding'}")
    return 0 if equal else 1


def _agree(theirs: list[int], reference: list[int]) -> bool:
    """Up to the shorter one: some implementations count the limit on tokens differently."""
    return all(a == b for a, b in zip(theirs, reference, strict=False))


if __name__ == "__main__":
    sys.exit(main())

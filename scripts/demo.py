"""Let a small model answer, or complete real code; show what speculation changed and what not."""

import json
import sys
from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx import Result, SamplingParams, Session, load
from dflash_mlx.generate import statistics
from dflash_mlx.pairs import DEMO, EMBEDDED
from dflash_mlx.smollm2 import default_pair

Prompt = str | list[dict[str, str]]

TOKENS = 96
FEW = 24
SLOW = 0.5  # seconds of a whole block, and they are shown in any case: long replies would take minutes
# None of them is a prompt that the drafter was trained on.
QUESTIONS: list[Prompt] = [
    [{"role": "user", "content": question}]
    for question in (
        "How do I keep a bicycle chain from rusting?",
        "Write a Python function that returns the three most common words of a text.",
        "What should I bring to a picnic with eight people?",
        "Explain why the sky is blue at noon and orange in the evening.",
    )
]


def main() -> int:
    """Returns 1 if speculation changed the text, which must never be."""
    session = load()
    for note in session.notes:
        print(note)
    if mx.default_device().type == mx.DeviceType.cpu:
        print(
            "(MLX's quantized matmul on the CPU costs the same for every row, so speculation could not pay.)"
        )
    code: list[Prompt] = json.loads((DEMO / "held_out.json").read_text(encoding="utf-8"))
    prompts = code if default_pair() is EMBEDDED else QUESTIONS
    is_slow = session.costs.seconds(session.largest_block, 0) > SLOW
    params = SamplingParams(max_tokens=FEW if is_slow else TOKENS)
    show(session, prompts[0], params)
    return 0 if compare(session, prompts, params) else 1


def show(session: Session, prompt: Prompt, params: SamplingParams) -> None:
    """Print one reply as it is verified."""
    dim, bold, plain = ("\033[2m", "\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    asked = prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n\n"
    print(f"\n{dim}{asked}{plain}{bold}", end="")
    events = []
    for event in session.stream(prompt, params, block_size=session.largest_block):
        print(event.text, end="", flush=True)
        events.append(event)
    print(plain)


def compare(session: Session, prompts: Sequence[Prompt], params: SamplingParams) -> bool:
    """Decode every prompt both ways, in turns, and print the figures. Returns whether the tokens agree."""
    seconds = {True: 0.0, False: 0.0}
    last: Result | None = None
    cycles, committed, equal = 0, 0, True
    for turn, prompt in enumerate(prompts):
        results = {}
        for speculative in (True, False) if turn % 2 else (False, True):
            results[speculative] = session.generate(
                prompt, params, block_size=session.largest_block, speculative=speculative
            )
            seconds[speculative] += results[speculative].decode_seconds
        equal &= results[True].tokens == results[False].tokens
        cycles += len(results[True].cycles)
        committed += sum(c.committed for c in results[True].cycles)
        last = results[True]
    assert last is not None
    print(f"\nThe last of {len(prompts)} replies: {statistics(last, session.exactness)}")
    print(f"\nOver all of them: tau {committed / cycles:.2f} tokens per verify cycle, bonus included")
    print(f"speculative {seconds[False] / seconds[True]:.2f}x the speed of plain decoding, on this machine")
    if sys.platform == "linux" and seconds[False] < 1.2 * seconds[True]:
        print(
            "(MLX's Linux wheel brings a slow BLAS, in which five rows cost five times one. With an installed"
        )
        print(" OpenBLAS: LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0 make demo)")
    print("token ids are identical" if equal else f"token ids DIFFER; this machine is {session.exactness}")
    return equal


if __name__ == "__main__":
    sys.exit(main())

"""Names and options -> a session: finds both models, checks that they fit, reads them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx

from dflash_mlx import hub, memory
from dflash_mlx.drafter import load_drafter
from dflash_mlx.errors import UsageError, memory_errors
from dflash_mlx.kernels import Kernels
from dflash_mlx.pairs import drafter_for
from dflash_mlx.session import Session
from dflash_mlx.smollm2 import default_target
from dflash_mlx.target import load_target
from dflash_mlx.target.load import read_weights

Progress = Callable[[str, int, int], None]
"""Told what is under way, such as "downloading owner/name", the bytes that are done, and all of them."""

NUMERICS = ("exact", "fast")


def load(
    target: str | None = None,
    drafter: str | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    draft_bits: int | None = None,
    adapter: str | None = None,
    dequantize: bool = False,
    numerics: str = "exact",
    block_size: int | None = None,
    prefill_step: int = 2048,
    prefixes: int | None = 0,
    progress: Progress | None = None,
) -> Session:
    """Load a pair.

    Args:
        target: folder or hub id of an mlx-lm model; None: SmolLM2 if it is here, else the embedded target,
            in float32 on a CPU.
        drafter: folder or hub id of a DFlash drafter; None: the one known for this target; "none": plain.
        revision, draft_revision: branch, tag or commit on the hub; a known drafter has one of its own.
        draft_bits: quantize the drafter's linear layers to 4 or 8 bits.
        adapter: folder or hub id of a LoRA adapter for the target, as mlx-lm trains them.
        dequantize: turn a quantized target into float32.
        numerics: "exact", where plain decoding has mlx-lm's bits, or "fast", where on a GPU a quantized
            target's has others, and larger blocks cost less; speculation changes no token in either.
        block_size: rows of a verify pass where a request names none; None: for each cycle what is fastest.
        prefill_step: prompt rows per forward pass.
        prefixes: bytes that caches of earlier requests may take, for prompts that begin alike; None: half of
            what the weights leave.
        progress: told what is under way, a download or the reading of weights, and how far it is.

    Raises:
        ModelError: a model cannot be found, read, or used, or the two do not belong together.
        OutOfMemoryError: there is no room for the pair; its weights were not read.
        UsageError: an argument is out of range.
    """
    if draft_bits not in (None, 4, 8):
        raise UsageError(f"draft_bits is {draft_bits!r}: it must be 4 or 8")
    if numerics not in NUMERICS:
        raise UsageError(f"numerics is {numerics!r}: it must be exact or fast")
    limit = memory.available()
    notes: list[str] = []
    if target is None:
        target, note = default_target()
        notes.append(note)
        # Both are small, and MLX's products with quantized weights cost the same for every row on a CPU.
        dequantize |= mx.default_device().type == mx.DeviceType.cpu
    folder, more = _get(target, revision, progress)
    notes += more
    if drafter is None:
        match = drafter_for(folder, target)
        drafter, draft_revision = match.pair.drafter, draft_revision or match.pair.revision
        notes += [match.note] if match.note else []
    # The drafter first: it is small, and what is wrong with it is known before the target is read.
    network = None
    if drafter != "none":
        draft_folder, more = _get(drafter, draft_revision, progress)
        notes += more
        network = load_drafter(draft_folder, bits=draft_bits)
    adapter_folder = None if adapter is None else hub.resolve(adapter)
    with memory_errors():
        kernels = Kernels(fast=numerics == "fast")
        if kernels.fast and not kernels.device.metal:
            notes.append("there is no GPU: numerics are exact")
        loaded = load_target(folder, adapter=adapter_folder, dequantize=dequantize, kernels=kernels)
        plan = memory.plan(loaded.target, network, prefill_step)
        room: int | None = memory.check_room(plan, limit)
        if room == plan.longest:
            room = None
        else:
            notes.append(f"there is memory for {room:,} tokens of context")
        memory.wire()
        read_weights(loaded.target, None if progress is None else partial(progress, "loading weights"))
        return Session(
            loaded.target,
            loaded.tokenizer,
            network,
            notes=(*notes, *loaded.notes),
            prefill_step=prefill_step,
            block_size=block_size,
            defaults=loaded.defaults,
            room=room,
            prefixes=(limit - plan.total(0)) // 2 if prefixes is None else prefixes,
            spare=lambda context: limit - plan.total(context),
        )


def _get(name: str, revision: str | None, progress: Progress | None) -> tuple[Path, list[str]]:
    """The folder of a model, and which commit it is."""
    report = None if progress is None else partial(progress, f"downloading {name}")
    folder = hub.resolve(name, revision, report)
    commit = hub.commit(folder)
    return folder, [] if commit is None else [f"{name} at commit {commit}"]

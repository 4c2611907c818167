"""Roll back a recurrent mixer by record and replay.

A recurrent state cannot be trimmed. So in a verify pass the mixer's linear children remember their
outputs; to keep n rows, the mixer itself runs again on the first n rows from the state before the block,
its linears answering from memory. No formula is copied, no weight is read a second time, and the output
projection's new input is never evaluated, because nobody asks for the result.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash_mlx.target.attach import Mixin, Undo, attach
from dflash_mlx.target.call import Call


class Tape:
    """What one verify pass leaves behind for one recurrent mixer."""

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer
        self.recording = False
        self.keep: int | None = None
        self.answers: dict[int, Iterator[mx.array]] = {}
        self.clear()
        self.undos: list[Undo] = [attach(mixer, _RecordedMixer, _tape=self)]
        self.undos += [
            attach(child, _RecordedLinear, _tape=self)
            for child in mixer.children().values()
            if isinstance(child, nn.Linear | nn.QuantizedLinear)
        ]

    def clear(self) -> None:
        """Forget the last pass."""
        self.outputs: dict[int, list[mx.array]] = {}  # of each linear, one for each of its calls
        self.call: Call | None = None

    def replay(self, keep: int) -> None:
        """Advance the mixer's cache, which stands before the block, over the block's first `keep` rows."""
        assert self.call is not None
        call = self.call.first(keep)
        self.answers = {linear: iter(outputs) for linear, outputs in self.outputs.items()}
        self.keep = keep
        try:
            self.mixer(*call.args, **call.kwargs)
        finally:
            self.keep = None


class _RecordedMixer(Mixin):
    """Mixin of a recurrent mixer."""

    _tape: Tape

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tape.recording:
            self._tape.call = Call(args, kwargs)
        return super().__call__(*args, **kwargs)


class _RecordedLinear(Mixin):
    """Mixin of a linear child: remembers its outputs, and answers with their first rows during a replay.

    Some mixers call it once for all rows, others once for each.
    """

    _tape: Tape

    def __call__(self, x: mx.array) -> mx.array:
        tape = self._tape
        if tape.keep is not None:
            answer = next(tape.answers[id(self)])
            return answer[:, : tape.keep] if answer.ndim == 3 else answer
        out: mx.array = super().__call__(x)
        if tape.recording:
            tape.outputs.setdefault(id(self), []).append(out)
        return out

"""Token ids -> text: whole characters, stop strings, reasoning apart. Knows nothing of models."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.markdown import Code

REPLACEMENT = "\ufffd"


def whole(text: str) -> str:
    """The text without halves of characters, which JSON can write and no tokenizer can read."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(frozen=True)
class Thinking:
    """How a model marks its reasoning.

    Attributes:
        start: the text that begins it.
        end: the text that ends it.
        open: the prompt already ends with `start`, so that the reply begins inside.
        others: further markers that end it.
    """

    start: str
    end: str
    open: bool
    others: tuple[str, ...] = ()


class Reply:
    """The growing reply as text, and the judge of where it ends.

    It ends at an end-of-sequence token, which is no part of the text, or at the token with which the answer
    read so far contains a stop string, which the text ends before. Of several that one token completes, the
    one that begins first counts. Tokens are read one by one, so nothing depends on how they are grouped.

    Stop strings are looked for in the answer only, and the answer is what it reads as, without reasoning and
    markers. One that can be seen in the beginning of a marker counts at once unless the same token completes
    the marker: waiting would let the reply grow past its stop.

    Args:
        tokenizer: its `decode` is all that is used.
        eos: token ids that end the reply.
        stop: strings that end it, none of them empty.
        thinking: the model's markers; None: all text is answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos: frozenset[int],
        stop: tuple[str, ...] = (),
        thinking: Thinking | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._splitter = _Splitter(thinking)
        self._eos = eos
        self._stop = stop
        self._answer: list[str] = []  # not yet drained, as is the reasoning
        self._reasoning: list[str] = []
        self._held = ""  # the end of the answer, while it may be the beginning of a stop string
        self._ended = self._stopped = False

    def take(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Read newly chosen tokens up to the end of the reply.

        Returns:
            How many of them belong to the reply, and whether it ends with the last of those.
        """
        if self._ended:
            return 0, True
        if not self._stop:
            return self._take_unread(tokens)
        for count, token in enumerate(tokens, 1):
            self._ended = token in self._eos or self._read(self._detokenizer.add([token]))
            if self._ended:
                return count, True
        return len(tokens), False

    def _take_unread(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """The same where no text can end the reply: a block decodes at the cost of one token."""
        end = next((i for i, token in enumerate(tokens) if token in self._eos), None)
        self._ended = end is not None
        self._read(self._detokenizer.add(tokens[:end]))
        return (len(tokens), False) if end is None else (end + 1, True)

    def drain(self) -> tuple[str, str]:
        """Answer and reasoning since the last call: whole characters that no later token can take back."""
        texts = "".join(self._answer), "".join(self._reasoning)
        self._answer, self._reasoning = [], []
        return texts

    def finish(self) -> tuple[str, str]:
        """The same, with what was held back: the reply is over, whatever ended it."""
        if not self._stopped and not self._read(self._detokenizer.finish()):
            for inside, text in self._splitter.finish():
                if inside:
                    self._reasoning.append(text)
                else:
                    self._say(text)
            self._answer.append(self._held)
            self._held = ""
        return self.drain()

    def _read(self, text: str) -> bool:
        """Whether this text completes a stop string."""
        for inside, part in self._splitter.add(text):
            if inside:
                self._reasoning.append(part)
            elif self._say(part):
                return True
        return not self._splitter.inside and self._cut(self._held + self._splitter.held)

    def _say(self, answer: str) -> bool:
        answer = self._held + answer
        if self._cut(answer):
            return True
        sure = len(answer) - beginning(answer, self._stop)
        self._answer.append(answer[:sure])
        self._held = answer[sure:]
        return False

    def _cut(self, answer: str) -> bool:
        if found := first(answer, self._stop):
            self._answer.append(answer[: found[0]])
            self._stopped = True
        return found is not None


class Detokenizer:
    """Text of a growing reply, exactly as decoding all of its ids at once would give it.

    A character may be split over tokens, and what a token reads as may depend on the token before it (a
    leading space, for one). So each new piece is the difference between decoding a short tail of the reply
    with and without its new ids, and an incomplete character at its end waits.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []  # ids from some character's beginning on
        self._old = 0  # how many of them are there only to be decoded before the others
        self._said = 0  # how many characters of the others have been handed out

    def add(self, ids: Sequence[int]) -> str:
        """The whole characters that these ids complete."""
        self._tail += ids
        new = self._new()
        # A token may end one character and begin the next; the first of them need not wait.
        whole = new.rstrip(REPLACEMENT)
        piece = whole[self._said :]
        if whole and whole == new:
            self._tail, self._old, self._said = self._tail[self._old :], len(self._tail) - self._old, 0
        else:
            self._said = max(self._said, len(whole))
        return piece

    def finish(self) -> str:
        """What is still held back: an incomplete character, as replacement characters."""
        piece = self._new()[self._said :]
        self._tail, self._old, self._said = [], 0, 0
        return piece

    def _new(self) -> str:
        return self._decode(self._tail)[len(self._decode(self._tail[: self._old])) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


class _Splitter:
    """Answer and reasoning, told apart by the markers between them.

    A marker says what follows it, whatever was before: a second start and a lone end are taken out as well.
    With a marker go the newlines right after it and, at the end of the reasoning, those right before it;
    models write them around markers and no reader wants them. All other text is in one of the two.

    A marker within Markdown's code is text, for the model writes about it: in reasoning only one between
    backticks, since a fence that nothing closes would hide the answer; none where markers frame messages.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._markers: tuple[str, ...] = ()
        if thinking is not None:
            self._markers = (thinking.start, thinking.end, *thinking.others)
        self.inside = thinking is not None and thinking.open
        self.held = ""  # the end of the text, while it may be the beginning of a marker
        self._code = None if thinking is None or thinking.others else Code()
        self._fresh = self.inside  # nothing but newlines since the last marker
        self._newlines = ""  # the reasoning's last ones, which go if the end marker follows

    def add(self, text: str, *, last: bool = False) -> list[tuple[bool, str]]:
        """Parts of the text in order, each with whether it is reasoning."""
        text = self.held + text
        parts = []
        while found := first(text, self._markers):
            at, marker = found
            parts.append(self._part(text[:at]))
            quoted = self._quoted(text[at + len(marker) :], last)
            if quoted is None:
                self.held = text[at:]
                return parts
            text = text[at + len(marker) :]
            if quoted:
                parts.append(self._part(marker))
                continue
            if marker == self._markers[0]:
                parts.append((self.inside, self._newlines))
            self.inside = marker == self._markers[0]
            self._fresh, self._newlines = True, ""
            self._code = self._code and Code()
        sure = len(text) - beginning(text, self._markers)
        self.held = text[sure:]
        return [*parts, self._part(text[:sure])]

    def finish(self) -> list[tuple[bool, str]]:
        """What was held back, which no marker follows any more."""
        parts = [*self.add("", last=True), self._part(self.held), (self.inside, self._newlines)]
        self.held = self._newlines = ""
        return parts

    def _part(self, text: str) -> tuple[bool, str]:
        if self._code:
            self._code.add(text)
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        if self.inside:
            text = self._newlines + text
            self._newlines = text[len(text.rstrip("\n")) :]
            text = text.rstrip("\n")
        return self.inside, text

    def _quoted(self, after: str, last: bool) -> bool | None:
        """Whether a marker between the text so far and this one is within code; None: not known yet."""
        if self._code is None:
            return False
        if not self.inside:
            return self._code.fenced or self._code.span > 0
        return self._code.span > 0 and (after.startswith("`") if after or last else None)


def first(text: str, words: Iterable[str]) -> tuple[int, str] | None:
    """Where the first of these words in the text begins, and which it is."""
    return min(((at, word) for word in words if (at := text.find(word)) >= 0), default=None)


def beginning(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a word; the text contains none whole."""
    longest = max(map(len, words), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(word.startswith(text[-size:]) for word in words):
            return size
    return 0

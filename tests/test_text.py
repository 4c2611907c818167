"""Streamed text is the decoded reply, cut between characters, ended by what ends it, reasoning apart."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from dflash_mlx.chat_template import CHANNELS
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.terminal import printable
from dflash_mlx.text import Detokenizer, Reply, Thinking

TEXTS = [
    " leading space, trailing space ",
    "def f(x):\n    return x  # ok .\n\n",
    "s = '你好 🙂 👩\u200d💻 \u200d é ẹ̄'",
    "\t\x1b[0m \u202e rtl שלום",
]
EOS = 999
CLOSED = Thinking("<think>", "</think>", open=False)
OPEN = Thinking("<think>", "</think>", open=True)


class Pieces:
    """A tokenizer whose tokens are these pieces of UTF-8."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.ids = list(range(len(pieces)))

    def decode(self, ids: Sequence[int], *, clean_up_tokenization_spaces: bool = True) -> str:
        data = b"".join(b"<eos>" if t == EOS else self.pieces[t] for t in ids)
        text = data.decode("utf-8", "replace")
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text


class ByteFallback(Pieces):
    """One token per byte, decoded as SentencePiece does: a run of bytes is all text or all replacements."""

    def decode(self, ids: Sequence[int], *, clean_up_tokenization_spaces: bool = True) -> str:
        run = b"".join(self.pieces[t] for t in ids)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


class Words(Pieces):
    """Words with a space before each, which is left out at the beginning of a text."""

    def decode(self, ids: Sequence[int], *, clean_up_tokenization_spaces: bool = True) -> str:
        return (
            super().decode(ids, clean_up_tokenization_spaces=clean_up_tokenization_spaces).removeprefix(" ")
        )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(Path(EMBEDDED.target))


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def grouped(ids: list[int], dice: random.Random, most: int = 5) -> Iterator[list[int]]:
    while ids:
        size = dice.randint(1, most)
        yield ids[:size]
        ids = ids[size:]


def read(
    tokenizer: Any,
    groups: Iterator[list[int]] | list[list[int]],
    stop: tuple[str, ...] = (),
    thinking: Thinking | None = None,
) -> tuple[int, bool, list[tuple[str, str]]]:
    """Tokens taken, whether they end the reply, and what could be shown after each group and at the end."""
    reply = Reply(tokenizer, eos=frozenset([EOS]), stop=stop, thinking=thinking)
    taken, ended, shown = 0, False, []
    for group in groups:
        count, ended = reply.take(group)
        taken += count
        shown.append(reply.drain())
        assert ended or count == len(group)
        if ended:
            break
    return taken, ended, [*shown, reply.finish()]


def answer(shown: list[tuple[str, str]]) -> str:
    return "".join(text for text, _ in shown)


def reasoning(shown: list[tuple[str, str]]) -> str:
    return "".join(text for _, text in shown)


# --- characters -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text_however_the_tokens_are_grouped(tokenizer: Any, text: str, seed: int) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(group) for group in grouped(tokenizer.encode(text), random.Random(seed), 3)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


@pytest.mark.parametrize("kind", [Pieces, ByteFallback])
def test_characters_come_whole_when_every_byte_is_a_token(kind: type[Pieces]) -> None:
    text = "a👩\u200d💻你好 é🙂🙂!"
    fake = kind(*(bytes([b]) for b in text.encode()))
    detokenizer = Detokenizer(fake)
    pieces = [detokenizer.add([t]) for t in fake.ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert detokenizer.finish() == ""


def test_the_space_between_words_is_not_lost_or_cleaned_up() -> None:
    detokenizer = Detokenizer(fake := Words(" one", " two", " ...", " .four"))
    assert [detokenizer.add([t]) for t in fake.ids] == ["one", " two", " ...", " .four"]


def test_text_before_an_incomplete_character_does_not_wait() -> None:
    smile = "🙂".encode()
    detokenizer = Detokenizer(fake := Pieces("x", b" " + smile[:2], smile[2:] + smile[:1], smile[1:] + b"."))
    assert [detokenizer.add([t]) for t in fake.ids] == ["x", " ", "🙂", "🙂."]


def test_bytes_that_are_no_character_come_as_replacements() -> None:
    detokenizer = Detokenizer(fake := Pieces("a", b"\xff", "b", b"\xff\xf0", b"\x9f\x99\x82", "\ufffd", "c"))
    pieces = [detokenizer.add([t]) for t in fake.ids]
    assert "".join(pieces) + detokenizer.finish() == "a\ufffdb\ufffd🙂\ufffdc"


def test_an_incomplete_character_waits_and_is_flushed_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("ab🙂")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(ids[:-1]) == "ab"
    assert set(detokenizer.finish()) == {"\ufffd"}
    assert detokenizer.finish() == ""


def test_nothing_gives_nothing(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add([]) == ""
    assert detokenizer.finish() == ""


# --- where a reply ends -----------------------------------------------------------------------

SMILE = "🙂".encode()


@pytest.mark.parametrize(
    ("pieces", "stop", "taken", "text"),
    [
        (["one", " STOP", " two"], ("STOP",), 2, "one "),
        (["one STOP two", "x"], ("STOP",), 1, "one "),
        (["one S", "TO", "P!", "x"], ("STOP",), 3, "one "),
        (["o", "n", "e"], ("one",), 3, ""),
        (["STOP", "x"], ("STOP",), 1, ""),
        (["one ST", "ATE"], ("STOP",), 2, "one STATE"),
        (["one ST"], ("STOP",), 1, "one ST"),
        (["a", "a", "a", "b", "c"], ("aab",), 4, "a"),
        (["ababab", "ac", "x"], ("ababac",), 2, "ab"),
        (["a\n", "\n", "b"], ("\n\n",), 2, "a"),
        (["xyz", "!"], ("z", "y"), 1, "x"),
        (["abcd", "!"], ("bc", "abcd"), 1, ""),
        (["ab", "c", "d"], ("bc", "abcd"), 2, "a"),
        (["a", "b", "c"], ("abc", "ab"), 2, ""),
        (["好", b"\xe5\xa5", b"\xbd!", "x"], ("好!",), 3, "好"),
        (["a", SMILE[:1], SMILE[1:3], SMILE[3:], "b"], ("🙂",), 4, "a"),
        (["a", SMILE[:1], SMILE[1:3], SMILE[3:] + b"?", "b"], ("🙂?",), 4, "a"),
        (["a", b"." + SMILE[:1], SMILE[1:]], (".",), 2, "a"),
        (["a", "b"], (), 2, "ab"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 99])
def test_a_reply_ends_with_the_token_that_completes_a_stop_string(
    pieces: list[str | bytes], stop: tuple[str, ...], taken: int, text: str, block: int
) -> None:
    fake = Pieces(*pieces)
    groups = [fake.ids[i : i + block] for i in range(0, len(fake.ids), block)]
    count, ended, shown = read(fake, groups, stop)
    assert (count, answer(shown)) == (taken, text)
    assert ended == any(word in decode(fake, fake.ids) for word in stop)


def test_an_end_of_sequence_token_is_taken_but_is_no_text() -> None:
    fake = Pieces("a", "b", "c")
    assert read(fake, [[0, EOS, 1]]) == (2, True, [("a", ""), ("", "")])
    assert read(fake, [[0], [1], [EOS]]) == (3, True, [("a", ""), ("b", ""), ("", ""), ("", "")])
    assert read(fake, [[0, EOS, 1, 2]], ("bc", "<eos>", "b"))[:2] == (2, True)


def test_the_end_gives_back_what_was_held() -> None:
    fake = Pieces("a ST", SMILE[:3], "<thi", "why\n")
    assert read(fake, [[0], [EOS]], ("STOP",)) == (2, True, [("a ", ""), ("", ""), ("ST", "")])
    assert read(fake, [[0], [1]], ("STOP",)) == (2, False, [("a ", ""), ("", ""), ("ST\ufffd", "")])
    assert read(fake, [[2]], (), CLOSED)[2] == [("", ""), ("<thi", "")]
    assert read(fake, [[0, 2]], ("STOP",), CLOSED)[2] == [("a ", ""), ("ST<thi", "")]
    assert read(fake, [[3]], (), OPEN)[2] == [("", "why"), ("", "\n")]
    assert read(Pieces("w</"), [[0]], (), OPEN)[2] == [("", "w"), ("", "</")]


def test_after_the_end_nothing_is_looked_at_and_nothing_comes() -> None:
    for stop, ids, text in [
        ("b", [0, 1], "a"),
        ("b", [0, EOS], "a"),
        ("ac", [0, EOS], "a"),
        ("<t", [3, EOS], "<"),
    ]:
        reply = Reply(Pieces("a", "b", "c", "<"), eos=frozenset([EOS]), stop=(stop,), thinking=CLOSED)
        assert reply.take([]) == (0, False)
        assert reply.take(ids) == (2, True)
        assert reply.take([2]) == (0, True)
        assert reply.finish() == (text, "")
        assert reply.finish() == reply.drain() == ("", "")


# --- reasoning --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thinking", "answered", "reasoned"),
    [
        ("<think>\nwhy\n</think>\n\nso", CLOSED, "so", "why"),
        ("why\n</think>\n\nso", OPEN, "so", "why"),
        ("\nwhy</think>so", OPEN, "so", "why"),
        ("<think>\n\n</think>\n\nso", CLOSED, "so", ""),
        ("</think>so", OPEN, "so", ""),
        ("so", CLOSED, "so", ""),
        ("\n so", CLOSED, "\n so", ""),
        ("why", OPEN, "", "why"),
        ("<think>a\n\nb", CLOSED, "", "a\n\nb"),
        ("<think>a</think>b\n<think>\nc</think>d", CLOSED, "b\nd", "ac"),
        ("<think>\nwhy</think>so", OPEN, "so", "why"),
        ("a\n<think>\nb</think>so", OPEN, "so", "a\nb"),
        ("so\n</think>\nit is", CLOSED, "so\nit is", ""),
        ("</think></think>\nso", OPEN, "so", ""),
        ("a < b <thin> </thinking>", CLOSED, "a < b <thin> </thinking>", ""),
        ("<<think>x<</think>y", CLOSED, "<y", "x<"),
        ("</think>\n\n    code\n", OPEN, "    code\n", ""),
        # what is written about markers
        ("Use `<think>` and `</think>`.", CLOSED, "Use `<think>` and `</think>`.", ""),
        (
            "a\n```\n<think>\n</think>\n```\n<think>b</think>c",
            CLOSED,
            "a\n```\n<think>\n</think>\n```\nc",
            "b",
        ),
        ("```\n<think>", CLOSED, "```\n<think>", ""),
        ("`x` <think>b</think>c", CLOSED, "`x` c", "b"),
        ("` x\n<think>b</think>c", CLOSED, "` x\nc", "b"),
        ("`a\n```\nb</think>c `<think>`", OPEN, "c `<think>`", "`a\n```\nb"),
        ("<think>`</think>` b</think>c", CLOSED, "c", "`</think>` b"),
        ("`4`</think>`4`", OPEN, "`4`", "`4`"),
        ("`a</think>b `c`", OPEN, "b `c`", "`a"),
        ("`a\n</think>`b`", OPEN, "`b`", "`a"),
        ("`a</think>", OPEN, "", "`a"),
        ("`a\n\n</think>", OPEN, "", "`a"),
        ("<think>a</think>b", None, "<think>a</think>b", ""),
        ("你<think>🙂\n</think>\n好", CLOSED, "你好", "🙂"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 99])
def test_reasoning_is_split_from_the_answer(
    text: str, thinking: Thinking | None, answered: str, reasoned: str, size: int
) -> None:
    data = text.encode()
    fake = Pieces(*(data[i : i + size] for i in range(0, len(data), size)))
    _, ended, shown = read(fake, [[t] for t in fake.ids], (), thinking)
    assert (answer(shown), reasoning(shown), ended) == (answered, reasoned, False)


def test_only_what_is_certain_is_shown() -> None:
    fake = Pieces("a <", "think", ">\n", "b\n", "\n", "</think", ">", "\n", "\nc S", "T", "OP")
    _, _, shown = read(fake, [[t] for t in fake.ids], ("STOP",), CLOSED)
    assert shown == [
        *[("a ", ""), ("", ""), ("", ""), ("", "b"), ("", ""), ("", "")],
        *[("", ""), ("", ""), ("c ", ""), ("", ""), ("", ""), ("", "")],
    ]


@pytest.mark.parametrize(
    ("pieces", "stop", "thinking", "taken", "answered", "reasoned"),
    [
        (["STOP", "</think>", "a", "STOP"], "STOP", OPEN, 4, "a", "STOP"),
        (["a\n\n", "</think>", "\n\n", "b", "\n\n"], "\n\n", OPEN, 5, "b", "a"),
        (["a", "<think>", "c", "</think>", "b"], "ab", CLOSED, 5, "", "c"),
        (["x", "ST", "<think>", "OP", "</think>", "OP"], "STOP", CLOSED, 6, "x", "OP"),
        (["a STOP<think>b</think>c"], "STOP", CLOSED, 1, "a ", ""),
        (["<think>b</think>STOP<think>c"], "STOP", CLOSED, 1, "", "b"),
        (["</think>", "b"], "</think>", OPEN, 2, "b", ""),
        # what may be a marker is answer as long as it is none
        (["a", "<", "think>"], "<", CLOSED, 2, "a", ""),
        (["a", "<think>", "b<"], "<", CLOSED, 3, "a", "b<"),
        (["a <", "t"], " <", CLOSED, 1, "a", ""),
        (["a", "</", "think>"], "</", OPEN, 3, "", "a"),
    ],
)
def test_stop_strings_are_looked_for_in_the_answer(
    pieces: list[str], stop: str, thinking: Thinking, taken: int, answered: str, reasoned: str
) -> None:
    fake = Pieces(*pieces)
    for groups in ([[t] for t in fake.ids], [fake.ids]):
        count, _, shown = read(fake, groups, (stop,), thinking)
        assert (count, answer(shown), reasoning(shown)) == (taken, answered, reasoned)


# --- against a reader that starts over with each token ----------------------------------------


def split(text: str, thinking: Thinking | None) -> tuple[str, str]:
    """Answer and reasoning of a text that is all there."""
    if thinking is None:
        return text, ""
    start, end = thinking.start, thinking.end
    said = {False: "", True: ""}
    inside = after = thinking.open
    begin = 0
    for found in [*re.finditer(f"{re.escape(start)}|{re.escape(end)}", text), None]:
        part, marker = (text[begin : found.start()], found[0]) if found else (text[begin:], "")
        if found and is_quoted(part, text[found.end() :], inside):
            continue
        if after:
            part = part.lstrip("\n")
        if inside and marker == end:
            part = part.rstrip("\n")
        said[inside] += part
        if found:
            inside, after, begin = marker == start, True, found.end()
    return said[False], said[True]


def is_quoted(before: str, after: str, inside: bool) -> bool:
    """Whether a marker between the two is text; `before` begins where the reasoning or the answer does."""
    *lines, line = before.split("\n")
    span = fence = ""
    for run in re.findall("`+", line):
        span = "" if run == span else span or run
    if inside:
        return bool(span) and after.startswith("`")
    for whole in lines:
        opened = re.match(r"\s*(`{3,}(?=[^`]*$)|~{3,})", whole)
        if not fence:
            fence = opened[1] if opened else ""
        elif re.fullmatch(rf"\s*{fence}{fence[0]}*\s*", whole):
            fence = ""
    return bool(fence or span or re.match(r"\s*~{3}", line))


def expected(
    fake: Pieces, ids: list[int], stop: tuple[str, ...], thinking: Thinking | None
) -> tuple[int, bool, str, str]:
    for count in range(1, len(ids) + 1):
        if ids[count - 1] == EOS:
            return count, True, *split(decode(fake, ids[: count - 1]), thinking)
        said, thought = split(decode(fake, ids[:count]).rstrip("\ufffd"), thinking)
        if cuts := [said.find(word) for word in stop if word in said]:
            return count, True, said[: min(cuts)], thought
    return len(ids), False, *split(decode(fake, ids), thinking)


MARKED = ["<think>", "</think>", "<thi", "nk>", "</th", "ink>", "\n</think>\n", "x</think>a"]
PLAIN = ["<", "/", "\n", "\n", "a", "b", "ab", " ", "aab\n", "好"]
CODE = ["`", "`", "``", "\n```\n", "\n~~~\n", "`</think>`"]
BYTES = [b"\xe5\xa5", b"\xbd", b"\xe5\xa5\xbda", SMILE[:2], SMILE[2:]]
STOPS = ["ab", "aab", "b\n", "\n\n", "<", "k>", "好", "好a", "🙂", "a<", "ba b", "</think>"]


@pytest.mark.parametrize("thinking", [None, CLOSED, OPEN], ids=["none", "closed", "open"])
def test_any_tokens_in_any_groups_read_as_their_text(thinking: Thinking | None) -> None:
    dice = random.Random(3)
    ends = {True: 0, False: 0}
    for _ in range(3000):
        fake = Pieces(*MARKED, *PLAIN, *CODE, *BYTES)
        ids = dice.choices(fake.ids, k=dice.randint(1, 14))
        if dice.random() < 0.2:
            ids.insert(dice.randrange(len(ids)), EOS)
        stop = tuple(dice.sample(STOPS, dice.randint(0, 2)))
        taken, ended, shown = read(fake, grouped(ids, dice), stop, thinking)
        got = taken, ended, answer(shown), reasoning(shown)
        assert got == expected(fake, ids, stop, thinking), (ids, stop)
        ends[ended] += 1
    assert min(ends.values()) > 300


@pytest.mark.parametrize("stop", ["# 好", "🙂", "return", "\n\n", " x", "never"])
@pytest.mark.parametrize("seed", range(3))
def test_a_real_tokenizers_tokens_do_too(tokenizer: Any, stop: str, seed: int) -> None:
    code = "def f(x):\n    return x  # 好🙂\n\n\nf(1)"
    text = f"<think>\n{code}\n</think>\n\n{code}"
    ids = tokenizer.encode(text)
    taken, ended, shown = read(tokenizer, grouped(ids, random.Random(seed)), (stop,), CLOSED)
    assert reasoning(shown) == code
    assert answer(shown) == code.partition(stop)[0]
    assert ended == (stop in code)
    assert code.partition(stop)[0] + (stop if ended else "") in decode(tokenizer, ids[:taken])
    assert stop not in decode(tokenizer, ids[: taken - 1]).partition("</think>\n\n")[2]


# --- terminals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("a\r\nb\x0b\x0c\x00\x08c", "a\nbc"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]52;c;cm0gLXJm\x07 and \x9d52;c;cm0\x9c", "]52;c;cm0gLXJm and 52;c;cm0"),
        ("\x9b2J \x7f\x80\x85\x9f.", "2J ."),
        ("\u202eevil\u202c \u2066a\u2069 \u200e\u200f\u061c.", "evil a ."),
        ("lone \ud83d surrogate", "lone  surrogate"),
        ("👩\u200d💻 é ẹ̄ 你好 שלום\u00a0[/b]", "👩\u200d💻 é ẹ̄ 你好 שלום\u00a0[/b]"),
    ],
)
def test_nothing_that_controls_a_terminal_is_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert "".join(map(printable, text)) == shown


def test_every_control_character_but_newline_and_tab_is_removed() -> None:
    kept = {chr(code) for code in [*range(0xA0), *range(0x2000, 0x2070)] if printable(chr(code))}
    assert {char for char in kept if not char.isprintable() and char < "\xa0"} == {"\n", "\t"}
    assert not kept & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
    assert {" ", "~", "\u200d", "\u2014"} <= kept


# --- channels ----------------------------------------------------------------------------------

GPT_OSS, MUSE = CHANNELS.values()


@pytest.mark.parametrize(
    ("thinking", "reply"),
    [
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>Let me\n\nsee.<|end|><|start|>assistant"
            "<|channel|>commentary<|message|>One `moment.<|end|><|start|>assistant"
            "<|channel|>analysis<|message|> Right.<|end|><|start|>assistant"
            "<|channel|>final<|message|> 42 <b>\n",
        ),
        (
            MUSE,
            "to=self<|message|>Let me\n\nsee.<|eom|>\n"
            "<|start|>assistant to=commentary<|message|>One `moment.<|eom|>\n"
            "<|start|>assistant to=self<|message|> Right.<|eom|>\n"
            "<|start|>assistant to=user<|message|> 42 <b>\n",
        ),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_messages_to_the_model_itself_are_reasoning(thinking: Thinking, reply: str, seed: int) -> None:
    dice = random.Random(seed)
    cuts = sorted(dice.sample(range(1, len(reply)), 12))
    fake = Pieces(*(reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)))
    read = Reply(fake, eos=frozenset([EOS]), thinking=thinking)
    assert read.take([*fake.ids, EOS]) == (len(fake.ids) + 1, True)
    assert read.finish() == ("One `moment. 42 <b>\n", "Let me\n\nsee. Right.")


def test_a_stop_string_in_a_message_to_the_model_itself_does_not_count() -> None:
    fake = Pieces(
        "<|channel|>analysis<|message|>stop",
        "<|end|><|start|>assistant",
        "<|channel|>final",
        "<|message|>a stop b",
    )
    read = Reply(fake, eos=frozenset([EOS]), stop=("stop",), thinking=GPT_OSS)
    assert read.take(fake.ids) == (4, True)
    assert read.finish() == ("a ", "stop")

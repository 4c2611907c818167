"""Splitting a growing reply: nothing lost, nothing twice, the same however it arrives."""

from __future__ import annotations

import random

import pytest
from dflash_chat.blocks import CODE_LINES, TEXT_LIMIT, Block, Code, Prose, Splitter, code_blocks, split
from dflash_chat.widgets.blocks import PlainBlock, ProseBlock, coloured, widget

from chat import logs

TEXTS = [
    logs.PROSE,
    logs.CODE,
    logs.LONG_LIST,
    "no newline at the end",
    "```python\nunclosed",
    "~~~\n```\n~~~\nafter",
    "````md\n```\ninner\n```\n````\n",
    "- a\n\n  still a\n- b\n\nafter the list\n",
    "1. one\n   ```py\n   x = 1\n     y\n   ```\n2. two\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n# head\ntext\n",
    "```\n\n```\n",
    "a ``` b\n",
    "    def f(x):\n\n        return x\n\nafter\n",
    "text\n    still the paragraph\n\n- a\n\n      code in the item\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_do_not_matter(text: str) -> None:
    whole = split(text)
    for seed in range(5):
        draw, splitter, at = random.Random(seed), Splitter(), 0
        blocks: list[Block] = []
        while at < len(text):
            step = draw.randint(1, 7)
            blocks += splitter.add(text[at : at + step])
            at += step
        assert blocks + splitter.finish() == whole


@pytest.mark.parametrize("text", TEXTS)
def test_every_word_is_there_once(text: str) -> None:
    shown = " ".join(block.text for block in split(text))
    fences = {"```python", "```", "~~~", "````md", "````", "```py"}
    words = [word for word in text.split() if word not in fences]
    assert [word for word in shown.split() if word not in fences] == words


def test_code_comes_in_pieces_that_join() -> None:
    lines = [f"line {n}" for n in range(3 * CODE_LINES)]
    blocks = split("```py\n" + "\n".join(lines) + "\n```\n")
    assert [(block.begins, block.ends) for block in blocks if isinstance(block, Code)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert "\n".join(block.text for block in blocks) == "\n".join(lines)
    assert code_blocks("x\n\n```py\n" + "\n".join(lines) + "\n```\n") == ["\n".join(lines)]


def test_a_long_list_is_cut_before_an_item() -> None:
    blocks = [block for block in split(logs.LONG_LIST) if isinstance(block, Prose)]
    assert len(blocks) > 4
    assert all(block.text[0].isdigit() for block in blocks[1:-1])
    assert [block.cut for block in blocks[1:-1]] == [True] * (len(blocks) - 3) + [False]


def test_an_endless_line_and_an_endless_table_are_cut() -> None:
    for text in ("word " * 5000, "| a | b |\n" * 5000, "x" * 50_000):
        splitter = Splitter()
        blocks = splitter.add(text)
        assert splitter.tail is None or len(splitter.tail.text) <= TEXT_LIMIT + 1
        assert "".join(block.text for block in blocks + splitter.finish()) == text


def test_the_tail_is_what_no_block_holds() -> None:
    splitter = Splitter()
    assert splitter.add("one\n\ntwo\nthr") == [Prose("one\n\n")]
    assert splitter.tail == Prose("two\nthr")
    assert splitter.add("ee\n\n```py\nx = ") == [Prose("two\nthree\n\n")]
    tail: Block | None = splitter.tail
    assert tail == Code("x = ", "py", begins=True, ends=False)


def test_indented_code_is_one_block() -> None:
    blocks = split("    def f(x):\n\n        return x\n\nafter\n")
    assert blocks == [Code("def f(x):\n\n    return x", "", begins=True, ends=True), Prose("after\n")]


@pytest.mark.parametrize(
    ("columns", "rows", "kind"), [(10, 19, ProseBlock), (10, 20, PlainBlock), (1000, 1, PlainBlock)]
)
def test_a_table_of_many_cells_is_shown_as_it_was_written(columns: int, rows: int, kind: type) -> None:
    head = f"{'|a' * columns}|\n{'|-' * columns}|\n"
    full, sparse = f"{'|b' * columns}|\n" * rows, "b\n" * rows  # cells that are left out are there, too
    assert {type(widget(Prose(head + body))) for body in (full, sparse)} == {kind}


def test_code_of_an_endless_line_has_no_colours() -> None:
    short, long = ("[1, " * (size // 4) for size in (TEXT_LIMIT, 2 * TEXT_LIMIT))
    assert coloured(Code(short, "json", begins=True, ends=True)).spans
    assert not coloured(Code(long, "json", begins=True, ends=True)).spans
    below = coloured(Code("[2]", "json", begins=False, ends=True), long)
    assert (below.plain, below.spans) == ("[2]", [])


def test_a_fence_in_a_list_loses_its_indent() -> None:
    assert code_blocks("1. one\n   ```py\n   x = 1\n     y\n   ```\n") == ["x = 1\n  y"]

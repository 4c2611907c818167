"""The demo pair's corpus and tokenizer: Python's own standard library, cut into top-level definitions.

A *document* is one top-level function or class with what precedes it, or the head of a module. Documents
are short enough that the model sees many ends, so a completion of it stops where a definition ends. Whole
files are held out, chosen by a hash of their path, so that the split does not depend on the order of a
directory.

This file knows text and tokens, and nothing about models.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
END_ID, MASK_ID = 0, 1
HELD_OUT_SHARE = 20  # one file in twenty
PROMPT_LENGTHS = (16, 32, 64, 96)
EXAMPLE_CHARACTERS = 120

# Third-party packages, tests, and tables written by programs (code pages, the text of the language
# reference).
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# A blank line before a top-level definition or its decorator begins a new document.
DOCUMENT_START = re.compile(r"\n\n+(?=(?:def|class|async def|if __name__)\b|@)")

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"  # this model completes, it cannot converse
)


@dataclass(frozen=True)
class SourceFile:
    """One module of the standard library; `path` is relative to it."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.path.encode()).digest()[0] % HELD_OUT_SHARE == 0

    def documents(self) -> list[str]:
        """The module's top-level pieces, each ending in one newline."""
        return [piece.strip("\n") + "\n" for piece in DOCUMENT_START.split(self.text) if piece.strip()]


def read_corpus() -> tuple[SourceFile, ...]:
    """The standard library of the Python that runs this, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            files.append(SourceFile(name.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return tuple(files)


def split_corpus(files: Iterable[SourceFile]) -> tuple[list[str], list[str]]:
    """The documents to train on, and the held-out ones."""
    train: list[str] = []
    held_out: list[str] = []
    for file in files:
        (held_out if file.held_out else train).extend(file.documents())
    return train, held_out


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Byte-level BPE, saved as `tokenizer.json` and `tokenizer_config.json` in `folder`."""
    tokenizer = Tokenizer(models.BPE())
    # Line ends stay apart from the indentation that follows, so that one id means "four deep" wherever it
    # stands.
    pieces = Regex(r"\n+| ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z_0-9]+|[ \t]+(?=[ \t]\S)|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """Token ids per document, each ended by `END_ID`."""
    return [[*encoding.ids, END_ID] for encoding in tokenizer.encode_batch(documents)]


def cut_prompts(documents: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Beginnings and middles of documents, in equal parts; lengths are few, so that prompts batch well."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        length = int(rng.choice(PROMPT_LENGTHS))
        document = documents[rng.integers(len(documents))]
        if len(document) > 2 * length:
            start = int(rng.integers(len(document) - length)) if len(prompts) % 2 else 0
            prompts.append(document[start : start + length])
    return prompts


def choose_examples(documents: list[str], count: int, seed: int) -> list[str]:
    """Whole first lines of long enough functions and classes: prompts to show, and to measure with."""
    rng = np.random.default_rng(seed)
    examples: list[str] = []
    for index in rng.permutation(len(documents)):
        document = documents[index]
        cut = document.find("\n", EXAMPLE_CHARACTERS) + 1
        if document.startswith(("def ", "class ")) and cut and len(document) > 2 * cut:
            examples.append(document[:cut])
    return examples[:count]

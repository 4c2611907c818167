"""Chats on disk: nothing is lost, whatever happens to the process."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dflash_chat.chat_file import Chat, Saved, discard, read
from dflash_chat.state import ChatState, Reply, Turn
from dflash_chat.store import Store, save

from dflash_mlx.errors import UsageError

WRITER = """
import sys
from pathlib import Path
from dflash_chat.state import Reply
from dflash_chat.chat_file import Chat
chat = Chat(Path(sys.argv[1]), "/here")
for turn in range(10**6):
    chat.user(f"question {turn} " + "q" * 3000)
    print(turn, flush=True)  # what was printed must be in the file
    for part in range(3):
        chat.part(f"answer {turn} part {part} " + "a" * 3000, "")
    chat.end(Reply(phase="done"))
"""


def reopen(path: Path) -> Saved:
    chat = Chat(path, "")
    saved = chat.open()
    chat.close()
    return saved


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sessions")


def filled(store: Store, *prompts: str, folder: str = "/here") -> Chat:
    chat = store.new(folder)
    for prompt in prompts:
        chat.user(prompt)
        chat.part("ans", "why")
        chat.part("wer", "")
        chat.end(Reply(phase="done", tokens=3))
    return chat


def test_what_was_said_comes_back(store: Store) -> None:
    chat = filled(store, "one", "two\nlines \x1b \ud800")
    chat.system("be brief")
    chat.title("numbers")
    chat.close()
    assert chat.path is not None
    saved = reopen(chat.path)
    assert (saved.folder, saved.title, saved.system) == ("/here", "numbers", "be brief")
    assert [turn.prompt for turn in saved.turns] == ["one", "two\nlines \x1b \ud800"]
    assert {(turn.reply.text, turn.reply.reasoning, turn.reply.tokens) for turn in saved.turns} == {
        ("answer", "why", 3)
    }


def test_rewinds_hide_and_keep(store: Store) -> None:
    chat = filled(store, "one", "two", "three")
    chat.rewind(1)
    chat.user("two again")
    chat.close()
    assert chat.path is not None
    assert [turn.prompt for turn in reopen(chat.path).turns] == ["one", "two again"]
    assert b"three" in chat.path.read_bytes()


def test_a_new_chat_is_no_file_until_something_is_said(store: Store) -> None:
    chat = store.new("/here")
    assert not list(store.all())
    chat.user("hello")
    assert [summary.title for summary in store.all()] == ["hello"]
    assert chat.path is not None
    assert chat.path.stat().st_mode & 0o77 == 0
    chat.close()


def test_a_temporary_chat_writes_nothing(tmp_path: Path) -> None:
    chat = Chat(None, "/here")
    chat.user("secret")
    chat.part("x", "")
    chat.end(Reply())
    chat.rewind(0)
    chat.close()
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "torn",
    [b'{"type": "user", "te', b"\xff\xfe\x00", b'{"type": "part", "text": 3}', b"[]", b"[" * 10**5],
)
def test_a_torn_line_is_skipped_and_later_ones_count(store: Store, torn: bytes) -> None:
    chat = filled(store, "one")
    assert chat.path is not None
    chat.close()
    with chat.path.open("ab") as file:
        file.write(torn)
    again = Chat(chat.path, "")
    assert [turn.prompt for turn in again.open().turns] == ["one"]
    again.user("two")
    again.close()
    assert [turn.prompt for turn in reopen(chat.path).turns] == ["one", "two"]


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file can grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(store: Store) -> None:
    chat = filled(store, "one")
    assert chat.path is not None
    before = chat.path.read_bytes()
    with full_at(len(before) + 30):
        chat.user("two")
        assert chat.trouble == chat.farewell == f"this chat cannot be saved: File too large ({chat.path})"
        chat.part("half", "")
    assert chat.path.read_bytes()[:-30] == before
    chat.end(Reply(phase="done"))
    assert chat.trouble == ""
    assert chat.farewell == f"chat saved in {chat.path}"
    chat.close()
    assert [(turn.prompt, turn.reply.text) for turn in reopen(chat.path).turns] == [
        ("one", "answer"),
        ("two", "half"),
    ]


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chat = Chat(tmp_path / "file" / "sessions" / "x.jsonl", "/here")
    for prompt in ("one", "two"):
        chat.user(prompt)
        assert "Not a directory" in chat.trouble
    assert chat.delete() is None
    (tmp_path / "file").unlink()
    chat.close()
    assert not list(tmp_path.iterdir())


def test_a_chat_that_is_open_or_gone_is_not_deleted(store: Store) -> None:
    chat = filled(store, "one")
    assert chat.path is not None
    with pytest.raises(UsageError, match="open in another window"):
        discard(chat.path)
    assert chat.path.exists()
    chat.close()
    assert discard(chat.path).exists()
    with pytest.raises(UsageError, match=r"cannot delete the chat .*: No such file"):
        discard(chat.path)


def test_a_chat_that_cannot_be_moved_stays_open(store: Store) -> None:
    chat = filled(store, "one")
    assert chat.path is not None
    (store.folder / "deleted").write_text("")
    with pytest.raises(UsageError, match="cannot move the chat"):
        chat.delete()
    chat.user("two")
    chat.close()
    assert [turn.prompt for turn in reopen(chat.path).turns] == ["one", "two"]


@pytest.mark.parametrize("name", ["~nobody_x/chat.md", "~nobody_x/chat.jsonl"])
def test_a_path_of_an_unknown_user_is_refused(name: str, store: Store) -> None:
    with pytest.raises(UsageError, match="names a user who is not known"):
        save(name, ChatState())
    with pytest.raises(UsageError, match="names a user who is not known"):
        store.find(name)


def test_figures_beyond_all_numbers_count_as_zero(tmp_path: Path) -> None:
    lines = (
        b'{"type": "chat", "version": 1}',
        b'{"type": "user", "text": "x"}',
        b'{"type": "end", "figures": {"tokens": 1e999}}',
    )
    [turn] = read(b"\n".join(lines), tmp_path).turns
    assert (turn.prompt, turn.reply.tokens) == ("x", 0)


def test_a_reply_without_an_end_counts_as_stopped(store: Store) -> None:
    chat = store.new("/here")
    chat.user("one")
    chat.part("half", "")
    chat.close()
    assert chat.path is not None
    [turn] = reopen(chat.path).turns
    assert (turn.reply.text, turn.reply.phase, turn.counts) == ("half", "stopped", True)


def test_kill_9_at_random_moments_loses_no_message(tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "chat.jsonl"
    for _ in range(6):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer:
            writer.stdout.readline()
            time.sleep(draw.uniform(0, 0.05))
            os.kill(writer.pid, signal.SIGKILL)
            told = writer.stdout.read().split()
        turns = reopen(path).turns
        last = int(told[-1]) if told else 0
        assert len(turns) > last
        for number, turn in enumerate(turns):
            assert turn.prompt.startswith(f"question {number} ")
            expected = "".join(f"answer {number} part {part} " + "a" * 3000 for part in range(3))
            assert expected.startswith(turn.reply.text)
            assert turn.reply.text == expected or number >= len(turns) - 2


def test_two_programs_never_write_into_one_chat(store: Store) -> None:
    chat = filled(store, "one")
    assert chat.path is not None
    with pytest.raises(UsageError, match="open in another window"):
        Chat(chat.path, "").open()
    chat.close()
    reopen(chat.path)


def test_the_last_chat_of_a_folder(store: Store) -> None:
    paths = []
    for number, folder in enumerate(("/here", "/here", "/there")):
        chat = filled(store, str(number), folder=folder)
        chat.close()
        assert chat.path is not None
        os.utime(chat.path, (number, number))
        paths.append(chat.path)
    last = store.last("/here")
    assert last is not None
    assert last.path == paths[1]
    assert store.last("/nowhere") is None
    assert [each.title for each in store.all()] == ["2", "1", "0"]
    assert store.prompts("/here") == ["0", "1"]


def test_names_find_chats(store: Store) -> None:
    chat = filled(store, "one")
    chat.close()
    assert chat.path is not None
    assert store.find(chat.path.stem[:-2]).path == chat.path
    assert store.find(str(chat.path)).path == chat.path
    with pytest.raises(UsageError, match="no chat 'x'"):
        store.find("x")
    filled(store, "two").close()
    with pytest.raises(UsageError, match="2 chats begin with"):
        store.find(chat.path.stem[:4])


def test_the_list_shows_title_and_turns_and_skips_what_is_no_chat(store: Store) -> None:
    chat = filled(store, "one", "two")
    (store.folder / "other.jsonl").write_text("not a chat\n")
    assert [(each.title, each.turns) for each in store.all()] == [("one", 2)]
    chat.rewind(1)
    assert [each.turns for each in store.all()] == [1]
    chat.title("first name")
    chat.title("last name")
    assert [each.title for each in store.all()] == ["last name"]
    where = chat.delete()
    assert where is not None
    assert where.exists()
    assert not list(store.all())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a chat"),
        (b"[]\n", "not a chat"),
        (b'{"type": "chat", "version": 99}\n', "version 99"),
        (b'{"type": "chat"}\n', "version None"),
    ],
)
def test_a_file_that_is_no_chat_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(data, tmp_path / "x")


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Chat(tmp_path / "none.jsonl", "").open()


def test_two_thousand_turns_are_read_at_once(tmp_path: Path) -> None:
    lines = [json.dumps({"type": "chat", "version": 1, "folder": "/here"})]
    for number in range(2000):
        lines.append(json.dumps({"type": "user", "text": f"question {number}"}))
        lines.append(json.dumps({"type": "part", "text": "word " * 100}))
        lines.append(json.dumps({"type": "end", "phase": "done", "figures": {"tokens": 100}}))
    data = "\n".join(lines).encode()
    start = time.process_time()
    assert len(read(data, tmp_path).turns) == 2000
    assert time.process_time() - start < 0.5


def test_saving_as_markdown_never_overwrites(tmp_path: Path) -> None:
    state = ChatState(title="t", system="s", turns=[Turn("a\nb", Reply(text="**c**"))])
    file = tmp_path / "x.md"
    assert save(str(file), state) == file
    assert file.read_text() == "# t\n\n> s\n\n**You**\n\n> a\n> b\n\n**c**\n"
    with pytest.raises(UsageError, match="is there already"):
        save(str(file), state)
    with pytest.raises(UsageError, match="No such file"):
        save(str(tmp_path / "no" / "x.md"), state)

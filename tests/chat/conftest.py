"""A fake engine per test, and a folder for chats that is not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chat.fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for child processes; and no clipboard of the machine is touched."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("WAYLAND_DISPLAY", "DISPLAY", "TMUX", "SSH_CONNECTION", "SSH_TTY", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")

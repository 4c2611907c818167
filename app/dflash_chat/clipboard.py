"""Copying: each way that may reach the reader's clipboard, and which of them it was."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

LIMIT = 70_000  # bytes; terminals cut or refuse a longer OSC 52
TIMEOUT = 2.0


def copy(
    text: str, write: Callable[[str], None] | None, folder: Path, env: Mapping[str, str] = os.environ
) -> str:
    """Copy `text`, and say in a few words how.

    Args:
        write: sends a control sequence to the terminal; None where there is no terminal.
        folder: for the file that is the last resort.
    """
    for command, name in _programs(env):
        if _run(command, text):
            return f"copied with {name}"
    if write is not None and len(text.encode("utf-8", "replace")) <= LIMIT:
        encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
        write(f"\x1b]52;c;{encoded}\a")
        return "sent to the terminal's clipboard (OSC 52; /save writes a file if yours refuses it)"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "copied.txt"
    file.write_text(text, encoding="utf-8", errors="replace")
    return f"no clipboard reached, written to {file}"


def _programs(env: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """Programs that set a clipboard and tell whether they did; over SSH only tmux reaches the reader's."""
    remote = "SSH_CONNECTION" in env or "SSH_TTY" in env
    ways: list[tuple[list[str], str]] = []
    if not remote:
        if sys.platform == "darwin":
            ways.append((["pbcopy"], "pbcopy"))
        if "WAYLAND_DISPLAY" in env:
            ways.append((["wl-copy"], "wl-copy"))
        if "DISPLAY" in env:
            ways.append((["xclip", "-selection", "clipboard"], "xclip"))
    if "TMUX" in env:
        ways.append((["tmux", "load-buffer", "-w", "-"], "tmux"))
    return [(command, name) for command, name in ways if shutil.which(command[0], path=env.get("PATH"))]


def _run(command: list[str], text: str) -> bool:
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0

"""The command `dflash-chat`. The engine starts first, so that it loads while the screen is being set up."""

import argparse
import gc
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from dflash_chat.chat_file import Chat, Saved
from dflash_chat.engine import Engine, new_log
from dflash_chat.firstframe import FirstFrame
from dflash_chat.store import Store, data_folder
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.options import add_block_size, add_pair_options, given


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="dflash-chat", description="Chat with a local model, and see it speculate."
    )
    add_pair_options(p)
    add_block_size(p)
    p.add_argument("--url", help="use the server that runs at this address instead of starting one")
    p.add_argument(
        "-c", "--continue", dest="last", action="store_true", help="continue this folder's last chat"
    )
    p.add_argument("--session", help="continue the chat of this id, or in this file")
    p.add_argument("--temp", action="store_true", help="keep nothing of this chat")
    p.add_argument(
        "--plain", action="store_true", help="line by line, as without a terminal or with TERM=dumb"
    )
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    p.add_argument("--version", action="store_true", help="show the version")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if the engine could not be used in plain mode; 2 for a bad argument.
    """
    args = parser().parse_args(argv)
    if args.version:
        from importlib.metadata import version  # slow to load, and seldom asked for

        print(version("dflash-chat"))
        return 0
    try:
        return _run(args)
    except DFlashError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    options = given(args)
    if args.block_size is not None:
        options += ["--block-size", str(args.block_size)]
    if args.url and options:
        raise UsageError(f"--url uses a server that runs already: leave out {options[0]}")
    if args.temp and (args.last or args.session):
        raise UsageError(
            "--temp keeps nothing, so it cannot continue a chat: leave it out, or -c and --session"
        )
    data = data_folder()
    store = Store(data / "sessions")
    chat, saved = _chat(args, store)
    url, process = address(args.url) if args.url else "", None
    if not args.url:
        process = Engine(options, new_log(data / "logs"))
        process.start()
        url = process.url
    try:
        if args.plain or not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
            from dflash_chat.plain import run

            return run(chat, saved, url, process)
        with FirstFrame() as first:
            gc.disable()  # loading a thousand classes makes no garbage, and looking for it takes time
            from dflash_chat.app import ChatApp

            gc.enable()
            app = ChatApp(store, chat, url, process, saved=saved, temporary=args.temp)
            first.hand_over()
            app.run()
        chat = app.talk.chat
    finally:
        if process is not None:
            process.stop()
    if chat.farewell:
        print(chat.farewell)
    return app.return_code or 0


def _chat(args: argparse.Namespace, store: Store) -> tuple[Chat, Saved | None]:
    folder = str(Path.cwd())
    if args.session:
        chat = store.find(args.session)
        return chat, chat.open()
    if args.last and (last := store.last(folder)) is not None:
        return last, last.open()
    return (Chat(None, folder) if args.temp else store.new(folder)), None


def address(url: str) -> str:
    """A server's address without path.

    Raises:
        UsageError: it is not http(s)://host[:port], with or without /v1.
    """
    wrong = UsageError(f"--url is {url!r}, expected an address such as http://127.0.0.1:8765")
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        raise wrong from None
    if not good or parts.path.rstrip("/") not in ("", "/v1") or parts.query:
        raise wrong
    return f"{parts.scheme}://{parts.netloc}"

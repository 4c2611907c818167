"""`python -m dflash_mlx.server`: the command."""

import argparse
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dflash_mlx import __version__
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.options import add_block_size, add_pair_options, pair_settings
from dflash_mlx.server.app import make_app
from dflash_mlx.server.engine import Engine
from dflash_mlx.server.security import LOOPBACK
from dflash_mlx.server.service import Service
from dflash_mlx.server.serving import Server, base_url, listen, on_end_of_input
from dflash_mlx.smollm2 import default_pair

if TYPE_CHECKING:
    from dflash_mlx.session import Session

PORT = 8765

STOP_SECONDS = 1.0
"""How long the engine's thread may take to end, once nobody waits for it."""


def parser() -> argparse.ArgumentParser:
    """The command line, from which the documentation's table is made."""
    p = argparse.ArgumentParser(
        prog="python -m dflash_mlx.server", description="An OpenAI-compatible endpoint."
    )
    add_pair_options(p)
    p.add_argument(
        "--host", default="localhost", help="where to listen; localhost (default): this machine alone"
    )
    p.add_argument("--port", type=int, default=PORT, help=f"0 lets the system choose (default: {PORT})")
    add_block_size(p)
    p.add_argument("--api-key", help="what clients must show; a host that others can reach needs one")
    p.add_argument("--max-queue", type=int, default=8, help="requests that may wait (default: 8)")
    p.add_argument(
        "--max-context", type=int, help="tokens of a conversation (default: all that the model has)"
    )
    p.add_argument(
        "--prefix-cache",
        type=float,
        metavar="GB",
        help="memory for what earlier requests computed, for prompts that begin alike; 0: none "
        "(default: half of what the weights leave)",
    )
    p.add_argument("--strict-model", action="store_true", help="answer 404 to requests for another model")
    p.add_argument(
        "--exit-with-parent", action="store_true", help="end when standard input does, as a child process"
    )
    p.add_argument("--debug", action="store_true", help="log more, with the tracebacks of errors")
    p.add_argument("--version", action="version", version=__version__)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command; it ends the process, unless it was called wrongly.

    Returns:
        The exit code: 0 when it was told to end; 2 for a bad argument; 3 for a model that cannot be used; 4
        without enough memory; 1 if the engine failed.
    """
    args = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if args.debug else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("dflash_mlx").setLevel(logging.DEBUG if args.debug else logging.INFO)
    try:
        _serve(args)
    except DFlashError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _serve(args: argparse.Namespace) -> NoReturn:
    _check(args)
    model, drafter = names(args.model, args.draft)
    sockets = listen(args.host, args.port)
    url = base_url(args.host, sockets)
    failures: list[BaseException] = []

    def ready() -> None:
        print(f"base URL: {url}\nmodel: {model}", flush=True)

    def failed(error: BaseException) -> None:
        # An engine that ends later leaves a server behind that says so.
        if engine.status.facts is None:
            failures.append(error)
            server.stop()

    engine = Engine(
        lambda progress: _load(args, progress),
        max_queue=args.max_queue,
        max_context=args.max_context,
        on_ready=ready,
        on_failed=failed,
    )
    service = Service(engine, model, drafter, url, strict_model=args.strict_model, created=int(time.time()))
    app = make_app(service, api_key=args.api_key, any_host=args.host not in LOOPBACK)
    server = Server(app, on_stop=lambda: engine.stop(timeout=0))
    engine.start()
    if args.exit_with_parent:
        on_end_of_input(server.stop)
    server.run_on(sockets, signals=True)
    code = _report(failures[0], debug=args.debug) if failures else 0
    engine.stop(STOP_SECONDS)
    # Nothing is left to be saved, a thread deep inside MLX cannot be interrupted, and Python would take
    # seconds to take apart all that was imported.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _load(args: argparse.Namespace, progress: Callable[[str, int, int], None]) -> "Session":
    from dflash_mlx.loading import load  # here, for it takes MLX seconds to be imported

    return load(
        **pair_settings(args),
        block_size=args.block_size,
        prefixes=None if args.prefix_cache is None else int(args.prefix_cache * 1e9),
        progress=progress,
    )


def _report(error: BaseException, *, debug: bool) -> int:
    if debug:
        raise error
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, DFlashError) else 1


def _check(args: argparse.Namespace) -> None:
    if args.host not in LOOPBACK and not args.api_key:
        raise UsageError(f"--host is {args.host}: others can reach it there, so it needs an --api-key")
    if args.max_queue < 0:
        raise UsageError(f"--max-queue is {args.max_queue}: it must be 0 or more")
    if args.max_context is not None and args.max_context < 2:
        raise UsageError(f"--max-context is {args.max_context}: it must be 2 or more")
    if args.prefix_cache is not None and not 0 <= args.prefix_cache < math.inf:
        raise UsageError(f"--prefix-cache is {args.prefix_cache}: it must be 0 or more")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is {args.port}: it must be in [0, 65535]")


def names(model: str | None, draft: str | None) -> tuple[str, str | None]:
    """What clients are told the pair is called: hub ids as they are, folders without where they are."""
    pair = default_pair()
    drafter = None if draft == "none" else draft or pair.drafter
    return _name(model) if model else pair.base, None if drafter is None else _name(drafter)


def _name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


if __name__ == "__main__":
    sys.exit(main())

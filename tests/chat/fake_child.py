"""Stands in for `python -m dflash_mlx.server`: takes its port, ends with its input, replays slowly."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a process of its own does not know the tests

from chat import logs
from chat.fake_engine import FakeEngine


def main() -> int:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    assert "--exit-with-parent" in sys.argv
    try:
        engine = FakeEngine(logs.compose(logs.PROSE * 200), port=port)
    except OSError:
        sys.exit(f"error: cannot listen on 127.0.0.1 port {port}: it is in use: pass another --port")
    engine.pace = 0.02
    print("the last words", file=sys.stderr, flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

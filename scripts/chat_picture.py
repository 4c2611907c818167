"""The README's picture: the real app, replaying the session in tests/chat/data/session.jsonl.

    PYTHONPATH=tests python scripts/chat_picture.py           write docs/chat.svg and docs/chat.txt
    PYTHONPATH=tests python scripts/chat_picture.py --check   1 if the text is not what the app shows now

The log was recorded by record_chat_log.py from the embedded pair.
"""

import json
import sys
import tempfile
from pathlib import Path

from chat.fake_engine import FakeEngine
from chat.stage import Stage, play

ROOT = Path(__file__).parents[1]
SESSION = ROOT / "tests" / "chat" / "data" / "session.jsonl"
SIZE = (100, 26)
CYCLES = 17  # the picture is taken after so many


def main() -> int:
    svg, text = picture()
    target = ROOT / "docs" / "chat.txt"
    if sys.argv[1:] == ["--check"]:
        return int(target.read_text(encoding="utf-8") != text)
    target.write_text(text, encoding="utf-8")
    (ROOT / "docs" / "chat.svg").write_text(svg, encoding="utf-8")
    return 0


def picture() -> tuple[str, str]:
    """The screen as SVG and as text, in the middle of the reply."""
    lines = SESSION.read_text(encoding="utf-8").splitlines()
    health, asked, *chunks = map(json.loads, lines)
    engine = FakeEngine(chunks)
    engine.health = health
    cycles = [number for number, chunk in enumerate(chunks) if is_cycle(chunk)]
    engine.hold = cycles[CYCLES]
    seen: list[str] = []

    async def story(stage: Stage) -> None:
        await stage.ready()
        await stage.type(asked["prompt"])
        await stage.until(lambda: engine.sent == engine.hold)
        reply = stage.app.talk.state.turns[0].reply
        await stage.until(lambda: len(reply.cycles) == CYCLES)
        await stage.drawn()
        seen.extend((stage.app.export_screenshot(title="dflash-chat"), stage.text + "\n"))

    with tempfile.TemporaryDirectory() as folder:
        play(story, engine, Path(folder), size=SIZE)
    engine.close()
    return seen[0], seen[1]


def is_cycle(chunk: dict[str, dict[str, object]]) -> bool:
    """Whether a chunk reports a verify cycle."""
    return chunk.get("dflash", {}).get("phase") == "block"


if __name__ == "__main__":
    sys.exit(main())

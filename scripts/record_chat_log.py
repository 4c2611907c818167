"""Record what the server sends for one reply, as an event log for the chat's tests and picture.

    python scripts/record_chat_log.py PROMPT FILE.jsonl [--url http://127.0.0.1:8765] [--max-tokens N]

The first line is the server's /health, the second the prompt, every other one a chunk of the stream.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import httpx
from dflash_chat.wire import sse_data


def main() -> int:
    p = argparse.ArgumentParser(description="Record the event log of one reply.")
    p.add_argument("prompt")
    p.add_argument("file", type=Path)
    p.add_argument("--url", default="http://127.0.0.1:8765")
    p.add_argument("--max-tokens", type=int)
    args = p.parse_args()
    lines = asyncio.run(record(args.url, args.prompt, args.max_tokens))
    args.file.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    return 0


async def record(url: str, prompt: str, max_tokens: int | None) -> list[object]:
    """Health, prompt and chunks."""
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True, "include_dflash": True},
    }
    if max_tokens:
        body["max_tokens"] = max_tokens
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        lines: list[object] = [(await client.get("/health")).raise_for_status().json(), {"prompt": prompt}]
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                lines += [json.loads(data) for data in sse_data(iter((line,)))]
    return lines


if __name__ == "__main__":
    sys.exit(main())

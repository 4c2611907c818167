"""A server whose model says what a script tells it, for clients that need more than the embedded pair can.

    python scripts/scripted_model.py [--port 8765]

All but the choice of words is real: a tiny random model reads the prompt, and a token mask lets nothing but
the script through. It thinks, and calls a tool for every text file that the user names, the first one whose
name speaks of reading; from the results it puts the halves of a password together.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.utils import load_tokenizer

from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.params import SamplingParams, TokenMask
from dflash_mlx.prompt import Prompt
from dflash_mlx.server.app import make_app
from dflash_mlx.server.engine import Engine
from dflash_mlx.server.service import Service
from dflash_mlx.server.serving import Server, base_url, listen, on_end_of_input
from dflash_mlx.session import Prepared, Session
from dflash_mlx.target import Target

NAME = "script/model"
"""With a slash, as in names of the model hub."""

CONTEXT = 65536
"""Tokens: agents begin with ten thousand and more."""

GREETING = "I am a script."
FILE = re.compile(r"[^\s\"'`<>]+\.txt")
HALF = re.compile(r"half: (\w+)")

TEMPLATE = """\
{%- if tools %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>
{%- endfor %}
{% endfor %}assistant: """
"""Writes conversations with tools; from the markers in it, mlx-lm knows how such a model calls them."""

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Single tokens, as in the models that use them."""

Objects = Sequence[Mapping[str, Any]]


def reply(messages: Objects, tools: Objects = ()) -> str:
    """What the model says next in this conversation."""
    asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    results = " ".join(m["content"] for m in messages[asked:] if m["role"] == "tool")
    files = FILE.findall(messages[asked]["content"])
    readers = [tool["function"] for tool in tools if "read" in tool["function"]["name"].lower()]
    if results:
        said = f"The password is {''.join(HALF.findall(results)).upper()}."
    elif files and readers:
        said = "I look.\n" + "\n".join(_call(readers[0], file) for file in files)
    else:
        said = GREETING
    return f"<think>\nThis is in my script.\n</think>\n\n{said}"


def _call(function: Mapping[str, Any], file: str) -> str:
    call = {"name": function["name"], "arguments": _least(function["parameters"], file)}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _least(schema: Mapping[str, Any], file: str) -> Any:
    """The least that this JSON schema asks for; every text in it is the file's name."""
    if schema.get("type") == "object":
        return {name: _least(schema["properties"][name], file) for name in schema.get("required", [])}
    return [_least(schema["items"], file)] if schema.get("type") == "array" else file


class Scripted(Session):
    """A session that answers messages by `reply`, and raw prompts by itself."""

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Prepared:
        params = params or SamplingParams()
        if prompt and isinstance(prompt[0], Mapping):
            text = reply(prompt, settings.get("tools", ()))  # type: ignore[arg-type]  # all are messages
            words = self.tokenizer.encode(text, add_special_tokens=False)
            params = replace(params, token_mask=self._only([*words, *self.tokenizer.eos_token_ids]))
        return super().prepare(prompt, params, **settings)

    def _only(self, script: Sequence[int]) -> TokenMask:
        def mask(before: Sequence[int]) -> Any:
            allowed = np.zeros(self.target.vocab_size, dtype=bool)
            allowed[script[len(before)]] = True
            return allowed

        return mask


def open_scripted() -> Scripted:
    """A layer of random weights, with the embedded target's tokenizer and the markers."""
    changes = {"chat_template": TEMPLATE, "extra_special_tokens": list(MARKERS)}
    tokenizer = load_tokenizer(Path(EMBEDDED.target), changes)
    config = {
        "model_type": "qwen3",
        "vocab_size": len(tokenizer.get_vocab()),
        "max_position_embeddings": CONTEXT,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    return Scripted(Target(model, context_length=CONTEXT), tokenizer, prefixes=1 << 30)


def main(argv: list[str] | None = None) -> int:
    """Serve until told to end, or until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args(argv)
    sockets = listen("localhost", args.port)
    url = base_url("localhost", sockets)

    def ready() -> None:
        print(f"base URL: {url}\nmodel: {NAME}", flush=True)

    engine = Engine(lambda progress: open_scripted(), on_ready=ready)
    server = Server(make_app(Service(engine, NAME, None, url)), on_stop=lambda: engine.stop(0))
    engine.start()
    on_end_of_input(server.stop)
    server.run_on(sockets, signals=True)
    return int(not engine.stop(10))


if __name__ == "__main__":
    sys.exit(main())

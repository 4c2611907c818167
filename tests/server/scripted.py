"""A server whose model can call tools, and says what a test tells it to."""

import itertools
import json
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from dflash_mlx import Session
from dflash_mlx.events import Block, Event, Finished, FinishReason, Prefilled
from dflash_mlx.pairs import EMBEDDED
from dflash_mlx.params import SamplingParams
from dflash_mlx.prompt import Prompt
from dflash_mlx.session import Prepared
from dflash_mlx.text import Reply
from server.live import Live, Watched, open_watched, running

TEMPLATE = (
    "{% if tools %}# {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}{% set tool_call = call.function %}"
    '# <tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "</tool_call>\n{% endfor %}{% endfor %}"
)
"""mlx-lm takes its parser from what is written here."""


class Speaking(Session):
    """Answers messages by a script, in blocks of several sizes, and everything else as a session does.

    Attributes:
        script: the replies to the next requests.
        prompts: what those requests were rendered to.
    """

    script: deque[str]
    prompts: list[str]

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Prepared:
        prepared = super().prepare(prompt, params, **settings)
        if prompt and isinstance(prompt[0], Mapping):
            self.prompts.append(self.tokenizer.decode(list(prepared.ids)))
        return prepared

    def run(self, request: Prepared) -> Iterator[Event]:
        if not self.script:
            return super().run(request)
        self._cancelled.clear()
        [eos, *_] = self.tokenizer.eos_token_ids
        return self._say(request, [*self.tokenizer.encode(self.script.popleft()), eos])

    def _say(self, request: Prepared, ids: list[int]) -> Iterator[Event]:
        reply = Reply(
            self.tokenizer, eos=self._eos, stop=tuple(request.params.stop), thinking=request.thinking
        )
        reason: FinishReason = "length"
        left = request.max_tokens or len(ids)
        sizes = itertools.cycle((1, 3, 5, 2, 4))
        kind: Any = Prefilled
        while left and reason == "length":
            size = min(next(sizes), left)
            taken, ended = reply.take(ids[:size])
            facts = {"prompt_tokens": len(request.ids)} if kind is Prefilled else {"drafted": 4}
            yield kind(tuple(ids[:taken]), *reply.drain(), **facts)
            ids, left, kind = ids[taken:], left - taken, Block
            reason = "stop" if ended else "cancelled" if self._cancelled.is_set() else "length"
        yield Finished((), *reply.finish(), finish_reason=reason)


class Scripted(Watched, Speaking):
    """One that can be slowed down, too."""


@contextmanager
def speaking(folder: Path) -> Iterator[Live]:
    """A server with such a session; a copy of the embedded target's tokenizer is changed in this folder."""
    shutil.copytree(EMBEDDED.target, folder)
    settings = folder / "tokenizer_config.json"
    changed = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    settings.write_text(json.dumps(changed), encoding="utf-8")

    def open_session() -> Scripted:
        session: Any = open_watched()
        session.__class__ = Scripted
        session.tokenizer = load_tokenizer(folder)
        session.script, session.prompts = deque(), []
        assert isinstance(session, Scripted)
        return session

    with running(open_session) as live:
        yield live

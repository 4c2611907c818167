"""The clients that `check_clients.py` tries, and how each is told of a server.

`docs/editors.md` shows the same files and commands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Client:
    """How to get a client, tell it of a server, and have it answer.

    In files, commands and environments, <FOLDER>, <URL>, <MODEL> and <PROMPT> stand for what they say.

    Attributes:
        packages: the first one is the client itself.
        files: by their places in the throw-away folder: `home` is the user's, `project` where it runs.
        turn: commands, the last of which asks the model something; empty: it needs tools for everything.
        loop: the same for something that needs tools; empty: it has none.
        environment: variables besides those of every client.
    """

    kind: Literal["pip", "npm"]
    packages: tuple[str, ...]
    files: Mapping[str, str]
    turn: Sequence[Sequence[str]] = ()
    loop: Sequence[Sequence[str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_LLM = Client(
    "pip",
    ("llm",),
    {
        "home/llm/extra-openai-models.yaml": """\
- model_id: dflash
  model_name: <MODEL>
  api_base: <URL>
  supports_tools: true
""",
        "project/tools.py": """\
def read(path: str) -> str:
    "Read a file"
    with open(path) as file:
        return file.read()
""",
    },
    turn=[["llm", "-m", "dflash", "-o", "max_tokens", "48", "<PROMPT>"]],
    loop=[["llm", "-m", "dflash", "--functions", "tools.py", "<PROMPT>"]],
    environment={"LLM_USER_PATH": "<FOLDER>/home/llm"},
)

_AIDER = Client(
    "pip",
    ("aider-chat",),
    {
        "home/.aider.conf.yml": """\
model: openai/<MODEL>
openai-api-base: <URL>
openai-api-key: unused
analytics: false
check-update: false
show-release-notes: false
""",
        "home/.aider.model.metadata.json": """\
{
  "openai/<MODEL>": {
    "litellm_provider": "openai",
    "mode": "chat",
    "max_input_tokens": 4096,
    "max_output_tokens": 4096,
    "input_cost_per_token": 0,
    "output_cost_per_token": 0
  }
}
""",
        "home/.aider.model.settings.yml": """\
- name: openai/<MODEL>
  use_repo_map: false
  extra_params:
    max_tokens: 48
""",
    },
    turn=[["aider", "--no-git", "--yes-always", "--chat-mode", "ask", "--message", "<PROMPT>"]],
)

_AI_SDK = Client(
    "npm",
    ("@ai-sdk/openai-compatible", "ai"),
    {
        "project/ask.mjs": """\
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const dflash = createOpenAICompatible({ name: "dflash", baseURL: "<URL>", includeUsage: true });
const read = tool({
  description: "Read a file",
  inputSchema: jsonSchema({ type: "object", properties: { path: { type: "string" } }, required: ["path"] }),
  execute: ({ path }) => readFileSync(path, "utf8"),
});
const [prompt, limit] = process.argv.slice(2);
const request = { model: dflash("<MODEL>"), prompt, stopWhen: stepCountIs(5) };
if (limit) request.maxOutputTokens = Number(limit);
else request.tools = { read };

const whole = await generateText(request);
const stream = streamText(request);
let text = "";
for await (const part of stream.textStream) text += part;
const last = (await stream.steps).at(-1);
if (last.text !== whole.text || last.finishReason !== whole.finishReason) throw new Error("not the same");
console.log(text, await stream.totalUsage);
""",
    },
    turn=[["node", "ask.mjs", "<PROMPT>", "48"]],
    loop=[["node", "ask.mjs", "<PROMPT>"]],
)

_OPENCODE = Client(
    "npm",
    ("opencode-ai",),
    {
        "home/.config/opencode/opencode.json": """\
{
  "provider": {
    "dflash": {
      "npm": "@ai-sdk/openai-compatible",
      "options": { "baseURL": "<URL>", "apiKey": "unused" },
      "models": { "<MODEL>": { "limit": { "context": 65536, "output": 8192 } } }
    }
  },
  "model": "dflash/<MODEL>",
  "small_model": "dflash/<MODEL>",
  "autoupdate": false,
  "share": "disabled"
}
""",
    },
    loop=[["opencode", "run", "<PROMPT>"]],
    environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
)

_CONTINUE = Client(
    "npm",
    ("@continuedev/cli",),
    {
        "home/.continue/config.yaml": """\
name: local
version: 0.0.1
schema: v1
models:
  - name: dflash
    provider: openai
    model: <MODEL>
    apiBase: <URL>
    apiKey: unused
    roles: [chat, edit, apply]
    capabilities: [tool_use]
""",
    },
    loop=[["cn", "--config", "<FOLDER>/home/.continue/config.yaml", "--print", "<PROMPT>"]],
    environment={"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_METRICS_ENABLED": "0"},
)

_CLINE = Client(
    "npm",
    ("cline",),
    {
        "home/.cline/data/settings/global-settings.json": """\
{ "telemetryOptOut": true, "autoUpdateEnabled": false }
""",
    },
    loop=[
        [
            "cline",
            "auth",
            "openai-compatible",
            "--apikey",
            "unused",
            "--modelid",
            "<MODEL>",
            "--baseurl",
            "<URL>",
        ],
        ["cline", "<PROMPT>"],
    ],
    environment={"CLINE_SESSION_BACKEND_MODE": "local", "CLINE_NO_AUTO_UPDATE": "1"},
)

CLIENTS = {
    "llm": _LLM,
    "aider": _AIDER,
    "ai-sdk": _AI_SDK,
    "opencode": _OPENCODE,
    "continue": _CONTINUE,
    "cline": _CLINE,
}

"""Write the tables of docs/ from the code that they describe; `--check` only compares.

`<!-- options: MODULE -->` begins a table of that command's options, `<!-- keys -->` that of the chat's keys,
`<!-- client: NAME -->` the files and commands with which that client of the endpoint is tried.
"""

import argparse
import importlib
import re
import sys
from pathlib import Path

from client_table import CLIENTS
from dflash_chat import commands

DOCS = Path(__file__).parents[1] / "docs"
OPTIONS = re.compile(r"(<!-- options: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CLIENT = re.compile(r"(<!-- client: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = {
    "home/": "~/",
    "project/": "",
    "<FOLDER>/home": "~",
    "<URL>": "http://127.0.0.1:8765/v1",
    "<MODEL>": "mlx-community/Qwen3.8-27B-4bit",
    "<PROMPT>": "'...'",
}
"""What stands for a client's throw-away folder, and for what differs from run to run."""

KEYS = re.compile(r"(<!-- keys -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Returns 1 if `--check` finds a page out of date."""
    stale = 0
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = OPTIONS.sub(lambda m: m[1] + options(m[2]) + m[3], old)
        new = KEYS.sub(lambda m: m[1] + keys() + m[2], new)
        new = CLIENT.sub(lambda m: m[1] + client(m[2]) + m[3], new)
        stale |= old != new
        if sys.argv[1:] != ["--check"]:
            page.write_text(new, encoding="utf-8")
    return int(stale and sys.argv[1:] == ["--check"])


def options(module: str) -> str:
    """A Markdown table of one command's options."""
    parser: argparse.ArgumentParser = importlib.import_module(module).parser()
    rows = ["| option | meaning |", "| --- | --- |"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        if isinstance(action, argparse._SubParsersAction):
            rows += [
                f"| `{command.dest} {_positionals(action.choices[command.dest])}` | {command.help} |"
                for command in action._choices_actions
            ]
            continue
        name = ", ".join(action.option_strings) or action.dest.upper()
        if action.choices:
            name += " " + "\\|".join(map(str, action.choices))
        elif action.option_strings and action.nargs != 0:
            name += " " + str(action.metavar or action.dest.upper()).replace("|", "\\|")
        rows.append(f"| `{name}` | {action.help} |")
    return "\n".join(rows) + "\n"


def _positionals(parser: argparse.ArgumentParser) -> str:
    return " ".join(action.dest.upper() for action in parser._actions if not action.option_strings)


def keys() -> str:
    """A Markdown table of the chat's keys and slash commands."""
    rows = ["| key | command | what it does |", "| --- | --- | --- |"]
    rows += [f"| {key} | {f'`{slash}`' if slash else ''} | {help} |" for key, slash, help in commands.rows()]
    return "\n".join(rows).replace("^\\", "^\\\\") + "\n"


def client(name: str) -> str:
    """The files and commands of a client of the endpoint, as its user would write them."""
    tried = CLIENTS[name]
    parts = []
    for path, text in tried.files.items():
        kind = {"yml": "yaml", "mjs": "js", "py": "python"}.get(suffix := path.rpartition(".")[2], suffix)
        parts.append(f"`{path}`\n\n```{kind}\n{text}```\n")
    lines = [" ".join(command) for command in dict.fromkeys(map(tuple, [*tried.turn, *tried.loop]))]
    if tried.environment:
        lines.insert(0, "export " + " ".join(f"{name}={value}" for name, value in tried.environment.items()))
    parts.append("```sh\n" + "\n".join(lines) + "\n```\n")
    return re.sub(
        "|".join(map(re.escape, SHOWN)), lambda found: SHOWN[found[0]], "\n" + "\n".join(parts) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())

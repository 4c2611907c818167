"""Write the tables of docs/ from the code that they describe; `--check` only compares.

`<!-- options: MODULE -->` begins a table of that command's options, `<!-- keys -->` that of the chat's keys.
"""

import argparse
import importlib
import re
import sys
from pathlib import Path

from dflash_chat import commands

DOCS = Path(__file__).parents[1] / "docs"
OPTIONS = re.compile(r"(<!-- options: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
KEYS = re.compile(r"(<!-- keys -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Returns 1 if `--check` finds a page out of date."""
    stale = 0
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = OPTIONS.sub(lambda m: m[1] + options(m[2]) + m[3], old)
        new = KEYS.sub(lambda m: m[1] + keys() + m[2], new)
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


if __name__ == "__main__":
    sys.exit(main())

"""Write the option tables of docs/commands.md from the commands' own parsers; `--check` only compares."""

import argparse
import importlib
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
MARKED = re.compile(r"(<!-- options: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Returns 1 if `--check` finds the page out of date."""
    old = PAGE.read_text(encoding="utf-8")
    new = MARKED.sub(lambda m: m[1] + table(m[2]) + m[3], old)
    if sys.argv[1:] == ["--check"]:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def table(module: str) -> str:
    """A Markdown table of one command's options."""
    parser: argparse.ArgumentParser = importlib.import_module(module).parser()
    rows = ["| option | meaning |", "| --- | --- |"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        name = ", ".join(action.option_strings) or action.dest.upper()
        if action.choices:
            name += " " + "\\|".join(map(str, action.choices))
        elif action.option_strings and action.nargs != 0:
            name += " " + str(action.metavar or action.dest.upper()).replace("|", "\\|")
        rows.append(f"| `{name}` | {action.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())

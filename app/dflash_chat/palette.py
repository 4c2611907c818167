"""The command palette's entries, from the table."""

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from dflash_chat.commands import COMMANDS, Command


class Commands(Provider):
    """Every command that has a name."""

    async def discover(self) -> Hits:
        """All of them, before anything is typed."""
        for command in _named():
            yield DiscoveryHit(_title(command), partial(self._do, command), help=command.help)

    async def search(self, query: str) -> Hits:
        """Those that match."""
        matcher = self.matcher(query)
        for command in _named():
            text = f"{command.name} {command.help}"
            if (score := matcher.match(text)) > 0:
                title = matcher.highlight(_title(command))
                yield Hit(score, title, partial(self._do, command), help=command.help)

    def _do(self, command: Command) -> None:
        self.app.choose(command)  # type: ignore[attr-defined]


def _named() -> list[Command]:
    return [command for command in COMMANDS if command.name and command.name != "palette"]


def _title(command: Command) -> str:
    return command.name.replace("_", " ") + (f"  {command.shown}" if command.shown else "")

"""The conversation: the newest turns as widgets, older ones when the reader scrolls up to them."""

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_chat import figures
from dflash_chat.state import ChatState, Turn
from dflash_chat.widgets import view
from dflash_chat.widgets.turn import TurnView

PAGE = 10  # turns mounted at once
MOST = 40  # turns kept as widgets while the reader follows the newest


class Transcript(VerticalScroll, can_focus=False):
    """Follows the newest text only while its reader is at the bottom."""

    def __init__(self, state: ChatState) -> None:
        super().__init__(id="transcript")
        self.state = state
        self._views: list[TurnView] = []
        self._first = 0  # index of the oldest turn that has a widget
        self._welcome = Static(classes="welcome")
        self._more = Static(classes="more")
        self._paging = False

    def on_mount(self) -> None:
        """Show the end of the conversation."""
        self.anchor()
        self.mount_all([self._welcome, self._more])
        self.reload()

    @property
    def following(self) -> bool:
        """Whether new text scrolls into view by itself."""
        return not self._anchor_released or self.scroll_y >= self.max_scroll_y

    def reload(self) -> None:
        """Another chat, or another end of this one."""
        for each in self._views:
            each.remove()
        self._first = max(0, len(self.state.turns) - PAGE)
        self._views = [TurnView(turn) for turn in self.state.turns[self._first :]]
        self.mount_all(self._views)
        self._update_edges()
        self.follow()

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.anchor()

    def sync(self, now: float) -> None:
        """Bring widgets and turns together: drop what was rewound, add what is new, grow the newest."""
        turns = self.state.turns[self._first :]
        same = 0
        while same < min(len(turns), len(self._views)) and self._views[same].turn is turns[same]:
            same += 1
        if same < len(self._views) or same < len(turns):
            for each in self._views[same:]:
                each.remove()
            fresh = [TurnView(turn) for turn in turns[same:]]
            self._views[same:] = fresh
            self.mount_all(fresh)
            self._trim()
            self._update_edges()
        if self._views and self._views[-1].is_mounted:
            self._views[-1].refresh_reply(now)
        if not self.state.turns:
            view.show(self._welcome, welcome(self.state, now), layout=True)

    def mark_edited(self, turn: Turn | None) -> None:
        """Dim the turn that is being changed."""
        for each in self._views:
            each.set_class(each.turn is turn, "edited")

    def watch_scroll_y(self, old: float, new: float) -> None:
        """Near the top, older turns come in above, and what is being read stays where it is."""
        super().watch_scroll_y(old, new)
        if new < old and new <= 2 and self._first and not self._paging:
            self._paging = True
            self.call_after_refresh(self._page)

    def _page(self) -> None:
        first = max(0, self._first - PAGE)
        older = [TurnView(turn) for turn in self.state.turns[first : self._first]]
        self._first, height = first, self.virtual_size.height
        self._views[:0] = older
        self.mount_all(older, after=self._more)
        self._update_edges()

        def settle() -> None:
            self.scroll_to(y=self.scroll_y + self.virtual_size.height - height, animate=False, force=True)
            self._paging = False

        self.call_after_refresh(settle)

    def _trim(self) -> None:
        """A long evening must not slow the screen down."""
        if self.following and len(self._views) > MOST:
            gone = len(self._views) - PAGE
            for each in self._views[:gone]:
                each.remove()
            del self._views[:gone]
            self._first += gone

    def _update_edges(self) -> None:
        self._welcome.display = not self.state.turns
        self._more.display = bool(self._first)
        if self._first:
            self._more.update(Content.styled(f"↑ {figures.plural(self._first, 'earlier turn')}", view.DIM))


def welcome(state: ChatState, now: float) -> Content:
    """What an empty chat shows."""
    engine = state.engine
    lines = [Content.styled("dflash-chat", view.ACCENT)]
    lines.append(Content.styled("speculative decoding, made visible", view.DIM))
    lines.append(Content(""))
    lines.append(Content(view.pair(engine)) if engine.model else view.engine_line(state, now))
    lines += [Content.styled(figures.shorten(view.safe(note), 200), view.DIM) for note in engine.notes]
    if engine.base_url:
        lines.append(Content.styled(f"editors connect to {view.safe(engine.base_url)}", view.DIM))
    return Content("\n").join(lines)

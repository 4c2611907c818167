"""State as styled lines: header, status, panel, summaries. All text is `Content`, never markup."""

from textual.content import Content
from textual.widgets import Static

from dflash_chat import figures
from dflash_chat.commands import COMMANDS
from dflash_chat.state import ChatState, Engine, Reply
from dflash_mlx.terminal import printable

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINS = 10  # a second
PANEL_WIDTH = 30
HISTOGRAM_ROWS = 8

DIM = "$foreground 55%"
STRONG = "bold"
ACCENT = "bold $primary"
BAD = "bold $error"

Part = str | tuple[str, str] | Content


def show(line: Static, content: Content, *, layout: bool = False) -> None:
    """Update a widget if its content changed; `layout` where its height may too."""
    shown = line.content
    if not isinstance(shown, Content) or not shown.is_same(content):
        line.update(content, layout=layout)


def safe(text: str) -> str:
    """One line of a foreign text, fit for the terminal."""
    return " ".join(printable(text).split())


def spinner(now: float) -> str:
    """The figure for this moment."""
    return SPINNER[int(now * SPINS) % len(SPINNER)]


def pair(engine: Engine) -> str:
    """Target and drafter by the last part of their names."""
    names = (name.rstrip("/").rpartition("/")[2] for name in (engine.model, engine.drafter) if name)
    return safe(" + ".join(names))


def address(engine: Engine) -> str:
    """Host and port."""
    return safe(engine.base_url).removeprefix("http://").removesuffix("/v1")


def sampling(state: ChatState) -> str:
    """How tokens are chosen, as far as the reader said."""
    temperature = state.options.get("temperature")
    if temperature is None:
        return ""
    return f"temp {temperature:g}" if temperature else "greedy"


def context(state: ChatState) -> str:
    """How full the context is."""
    if not state.engine.context_window or not state.context_tokens:
        return ""
    return f"ctx {_share(state)}"


def _share(state: ChatState) -> str:
    """Part of the context window that is in use."""
    part = 100 * state.context_tokens / state.engine.context_window
    return f"{part:.0f}%" if part >= 1 else "<1%"


def header(state: ChatState, width: int) -> Content:
    """Name and pair to the left; sampling, context and address to the right."""
    engine = state.engine
    dot = ("● ", "$success") if engine.ready else ("○ ", "$warning")
    if engine.status in ("dead", "failed", "unreachable"):
        dot = ("✗ ", "$error")
    facts = [fact for fact in (sampling(state), context(state)) if fact]
    thinking = f"think {state.thinking}" if state.thinking else ""
    right = Content.assemble(
        (" · ".join([*filter(None, [thinking]), *facts, ""]), DIM), dot, (address(engine), DIM), " "
    )
    title = figures.shorten(printable(state.title), 40)
    left = Content.assemble(
        " ", ("dflash-chat", ACCENT), "  ", (pair(engine), STRONG), (f"  {title}" if title else "", DIM)
    )
    room = width - right.cell_length - 1
    if left.cell_length > room:
        left = left.truncate(max(0, room), ellipsis=True)
    return Content.assemble(left, " " * max(1, width - left.cell_length - right.cell_length), right)


def engine_line(state: ChatState, now: float) -> Content:
    """What the engine is doing, or what is wrong with it."""
    engine = state.engine
    match engine.status:
        case "starting":
            return Content.assemble((spinner(now), ACCENT), " starting the engine")
        case "loading":
            what = safe(engine.loading) or "loading"
            if engine.total_bytes:
                done, total = figures.gigabytes(engine.loaded_bytes), figures.size(engine.total_bytes)
                what += f" {done}/{total}"
            return Content.assemble((spinner(now), ACCENT), f" {what}")
        case "ok":
            return Content.assemble(("●", "$success"), " ready")
        case "unreachable":
            return Content.assemble(
                ("✗ ", BAD), f"{safe(engine.message)}: {safe(engine.base_url)}", (" · trying again", DIM)
            )
    hint = "  F5 starts it again" if state.own_engine else ""
    return Content.assemble(("✗ ", BAD), safe(engine.message), (hint, ACCENT))


def live_line(state: ChatState, reply: Reply, now: float, *, numbers: bool) -> Content:
    """The reply that is on its way; `numbers` adds what the panel would show."""
    match reply.phase:
        case "loading" if not state.engine.ready:
            parts: list[Part] = [engine_line(state, now), (" · your message is next", DIM)]
        case "loading":
            parts = [(spinner(now), ACCENT), " sending"]
        case "waiting":
            ahead = f" ({reply.ahead} ahead)" if reply.ahead else ""
            parts = [(spinner(now), ACCENT), f" waiting{ahead}"]
        case "reading":
            parts = [(spinner(now), ACCENT), f" reading prompt {_progress(reply, now)}"]
        case "thinking":
            since = now - (reply.first if reply.first is not None else now)
            parts = [(spinner(now), ACCENT), f" thinking {figures.seconds(max(0.0, since))}"]
        case _:
            parts = [(spinner(now), ACCENT), " generating"]
    if reply.tokens and not numbers:
        parts.append((f" · {figures.plural(reply.tokens, 'token')}", DIM))
    if numbers and (speed := reply.recent_speed) is not None:
        line = figures.sparkline(reply.speeds, 8)
        parts += ["  ", (f"{figures.speed(speed)} tok/s", STRONG), f" {line}"]
        if reply.accepted is not None:
            parts.append(f"  accept {reply.accepted:.1f}{_of_block(state.engine, '/')}")
        if times := _times_plain(state, reply, speed):
            parts.append(f"  {times}")
    return Content.assemble(*parts)


def _progress(reply: Reply, now: float) -> str:
    if not reply.to_read:
        return ""
    text = f"{100 * reply.read / reply.to_read:.0f} % of {figures.count(reply.to_read)}"
    spent = now - reply.sent
    return f"{text}  {figures.count(reply.read / spent)} tok/s" if reply.read and spent > 0.2 else text


def _of_block(engine: Engine, between: str) -> str:
    return f"{between}{engine.block_size}" if engine.block_size else ""


def _times_plain(state: ChatState, reply: Reply, speed: float) -> str:
    """This speed over that of plain decoding, or that it is just that; nothing where none was measured."""
    plain = state.engine.plain_speed
    if not plain:
        return ""
    return "plain" if reply.accepted is None else f"{speed / plain:.1f}x plain"


def hints() -> Content:
    """The keys that the bottom line shows."""
    parts: list[tuple[str, str]] = [(" ", "")]
    for command in COMMANDS:
        if command.hint:
            parts += [(f"{command.shown} ", "$primary"), (f"{command.hint}  ", DIM)]
    return Content.assemble(*parts)


def summary(reply: Reply) -> Content:
    """One line about a complete reply."""
    if reply.phase == "failed":
        return Content.assemble(("✗ ", BAD), safe(reply.error), ("  ^r tries again", DIM))
    facts = []
    if reply.phase in ("stopped", "length"):
        facts.append({"stopped": "stopped", "length": "cut at the token limit"}[reply.phase])
    if reply.tokens:
        facts.append(figures.plural(reply.tokens, "token"))
    if reply.speed is not None:
        facts.append(f"{figures.speed(reply.speed)} tok/s")
    if reply.accepted is not None:
        facts.append(f"{reply.accepted:.1f} accepted")
    if reply.first is not None:
        facts.append(f"{figures.seconds(reply.first - reply.sent)} to first token")
    return Content.styled(" · ".join(facts), DIM)


def thinking(reply: Reply, now: float, *, folded: bool) -> Content:
    """The line that stands for the reply's thinking, and the thinking itself where it is unfolded."""
    arrow = "▶" if folded else "▼"
    if reply.live and reply.answered is None:
        since = figures.seconds(max(0.0, now - (reply.first if reply.first is not None else now)))
        head = f"{arrow} thinking {since}"
    else:
        head = f"{arrow} thought for {figures.seconds(reply.thought_seconds)}"
        if reply.reasoning_tokens:
            head += f" · {figures.plural(reply.reasoning_tokens, 'token')}"
    if folded:
        return Content.styled(head, DIM)
    return Content.assemble((head, DIM), "\n", (printable(reply.reasoning).strip(), f"{DIM} italic"))


def panel(state: ChatState, now: float) -> Content:
    """Speed, acceptance, this turn, memory and context."""
    reply = state.reply
    lines: list[Content] = []
    lines += [*_speed(state, reply), Content("")]
    if histogram := _histogram(state.engine, reply):
        lines += [*histogram, Content("")]
    if reply is not None and (reply.prompt_tokens or reply.tokens):
        lines += [_label("this turn"), *_turn(reply, now), Content("")]
    if machine := _machine(state):
        lines += [_label("engine"), *machine, Content("")]
    if state.engine.base_url:
        lines += [_label("for editors"), Content(safe(state.engine.base_url))]
    return Content("\n").join(lines)


def _label(text: str, right: str = "") -> Content:
    gap = " " * max(1, PANEL_WIDTH - len(text) - len(right)) if right else ""
    return Content.assemble((text, DIM), gap, (right, STRONG))


def _row(left: str, right: str) -> Content:
    return Content(left + " " * max(1, PANEL_WIDTH - len(left) - len(right)) + right)


def _speed(state: ChatState, reply: Reply | None) -> list[Content]:
    speed = None
    if reply is not None:
        speed = reply.recent_speed if reply.live else reply.speed
    if reply is None or speed is None:
        return [_label("speed"), Content.styled("–", DIM)]
    plain = _times_plain(state, reply, speed)
    number = f"{figures.speed(speed)} tok/s"
    gap = " " * max(1, PANEL_WIDTH - len(number) - len(plain))
    first = Content.assemble((number, ACCENT), gap if plain else "", plain)
    return [_label("speed"), first, Content.styled(figures.sparkline(reply.speeds, PANEL_WIDTH), "$primary")]


def _histogram(engine: Engine, reply: Reply | None) -> list[Content]:
    if reply is None or reply.accepted is None:
        return []
    of = f" of {engine.block_size}" if engine.block_size else ""
    lines = [_label("accepted/block", f"{reply.accepted:.1f}{of}")]
    largest = max([engine.block_size, *reply.histogram])
    step = -(-largest // HISTOGRAM_ROWS)
    groups = [range(low, min(low + step, largest + 1)) for low in range(1, largest + 1, step)]
    counts = [sum(reply.histogram[size] for size in group) for group in groups]
    top = max(counts, default=0) or 1
    digits = len(str(top))
    name_width = max(len(_name(group)) for group in groups)
    for group, count in zip(groups, counts, strict=True):
        width = PANEL_WIDTH - name_width - digits - 2
        bar = figures.bar(count / top, width)
        lines.append(
            Content.assemble(
                (f"{_name(group):>{name_width}} ", DIM),
                (f"{bar:<{width}}", "$primary"),
                f" {count:>{digits}}",
            )
        )
    return lines


def _name(group: range) -> str:
    return str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"


def _turn(reply: Reply, now: float) -> list[Content]:
    lines = []
    if reply.prompt_tokens:
        lines.append(_turn_row("prompt", reply.prompt_tokens, reply.prompt_seconds))
        if reply.cached_tokens:
            lines.append(_row("cached", f"{figures.spaced(reply.cached_tokens)} tok" + " " * 9))
    if reply.tokens:
        lines.append(_turn_row("reply", reply.tokens, reply.decode_seconds))
    return lines


def _turn_row(name: str, tokens: int, spent: float) -> Content:
    return _row(name, f"{figures.spaced(tokens)} tok {figures.seconds(spent):>8}")


def _machine(state: ChatState) -> list[Content]:
    engine = state.engine
    lines = []
    if engine.memory:
        total = f" / {figures.size(engine.memory_total)}" if engine.memory_total else ""
        same_unit = total and engine.memory >= 0.95e9
        used = figures.gigabytes(engine.memory) if same_unit else figures.size(engine.memory)
        lines.append(_row("memory", f"{used}{total}"))
    if engine.context_window:
        tokens, window = state.context_tokens, engine.context_window
        share = f"  {_share(state)}" if tokens else ""
        lines.append(_row("context", f"{figures.count(tokens)} / {figures.count(window)}{share}"))
    if engine.exactness:
        lines.append(_row("text", engine.exactness.partition(":")[0]))
    return lines

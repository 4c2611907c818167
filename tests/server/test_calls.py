"""Calls are cut out of an answer, however it comes in pieces; all else is content, to the last character."""

import json
import pkgutil
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx_lm.tool_parsers
import pytest

from dflash_mlx.server import calls
from dflash_mlx.server.calls import Call, Offer, Splitter
from dflash_mlx.server.syntax import Syntax
from server.formats import SAMPLES, TOOLS, WEATHER, offer, syntax

JSON = offer("json_tools")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OTHER = '<tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'
NOW_CALL, OTHER_CALL = Call("now", "{}"), Call("get_weather", '{"days": 3}')


def pieces(text: str, sizes: Iterator[int]) -> Iterator[str]:
    while text:
        size = next(sizes)
        yield text[:size]
        text = text[size:]


def read(offer: Offer, parts: list[str]) -> list[str | Call]:
    """All that a splitter says, with texts that follow each other as one."""
    splitter = Splitter(offer)
    said = [part for text in parts for part in splitter.add(text)]
    return merged([*said, *splitter.add("", last=True)])


def merged(parts: list[str | Call]) -> list[str | Call]:
    whole: list[str | Call] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def splits(text: str) -> Iterator[list[str]]:
    """The text in one piece, character by character, and cut in two at every place."""
    yield list(text)
    for at in range(len(text)):
        yield [text[:at], text[at:]]


def meanings(parts: list[str | Call]) -> list[Any]:
    return [part if isinstance(part, str) else (part.name, json.loads(part.arguments)) for part in parts]


# --- every format ---------------------------------------------------------------------------------


def test_there_is_a_sample_of_every_format_that_mlx_lm_reads() -> None:
    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert SAMPLES.keys() - {"harmony"} == modules


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_of_every_format_in_any_pieces(name: str) -> None:
    text, expected = SAMPLES[name]
    for before, after in (("", ""), ("Let me see: 2 < 3.\n\n", "\n")):
        whole = before + text + after
        first = read(offer(name), [whole])
        assert meanings(first) == [*([before.strip()] if before else []), *expected]
        for parts in splits(whole):
            assert read(offer(name), parts) == first


@pytest.mark.parametrize("name", [name for name in SAMPLES if syntax(name).end])
def test_a_call_is_told_of_as_soon_as_it_is_complete(name: str) -> None:
    text, expected = SAMPLES[name]
    splitter = Splitter(offer(name))
    assert splitter.add("Well. ") == ["Well."]
    early = [part for char in text[:-1] for part in splitter.add(char)]
    [*late, after] = splitter.add(text[-1] + " So")
    assert late
    assert meanings([*early, *late]) == list(expected)
    assert isinstance(after, str)
    assert after.split() == ["So"]
    assert splitter.add(" it") == [" it"]


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_that_are_cut_short_are_content(name: str) -> None:
    text, expected = SAMPLES[name]
    start = next(start for start in syntax(name).starts if text.startswith(start))
    for size in range(len(start), len(text)):
        got = read(offer(name), [text[:size]])
        assert all(call in expected for call in meanings(got) if not isinstance(call, str))
    assert read(offer(name), [text[: len(start) + 3]]) == [text[: len(start) + 3]]


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_of_tools_that_were_not_offered_are_content(name: str) -> None:
    text, _ = SAMPLES[name]
    alone = Offer(syntax(name), ())
    for parts in ([text], list(text)):
        assert read(alone, parts) == [text]


def test_a_model_may_name_its_calls() -> None:
    [first, second] = read(offer("kimi_k2"), [SAMPLES["kimi_k2"][0]])
    assert isinstance(first, Call)
    assert isinstance(second, Call)
    assert (first.id, second.id) == ("functions.get_weather:0", "functions.now:1")
    old: list[Any] = [{"name": "now", "arguments": {}, "id": own} for own in ("abcdefghi", "", None)]
    text = f"[TOOL_CALLS]{json.dumps(old)}"
    assert read(offer("mistral"), [text]) == [Call("now", "{}", "abcdefghi"), NOW_CALL, NOW_CALL]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
    ],
)
def test_harmony_has_headers_of_many_kinds(header: str) -> None:
    text = header + json.dumps(WEATHER[1])
    for parts in splits(text):
        assert meanings(read(offer("harmony"), parts)) == [WEATHER]
    assert read(offer("harmony"), [text + "}"]) == [text + "}"]


# --- content ----------------------------------------------------------------------------------------

FENCED = f"So:\n```xml\n{CALL}\n```\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" plain \n text \n\n", [" plain \n text \n\n"]),
        ("a <tool_call", ["a <tool_call"]),
        ("a < b <tool> </tool_call>", ["a < b <tool> </tool_call>"]),
        # whitespace
        (f"\n\n{CALL}\n", [NOW_CALL]),
        (f"a\n\n{CALL}\n\n", ["a", NOW_CALL]),
        (f"{CALL}\n\n{OTHER}", [NOW_CALL, OTHER_CALL]),
        (f"\n{CALL}\n\nb\n", [NOW_CALL, "b\n"]),
        (f"a\n\n{CALL}\nb\n", ["a", NOW_CALL, "\n\n\nb\n"]),
        # code
        (FENCED, [FENCED]),
        (FENCED + CALL, [FENCED.rstrip(), NOW_CALL]),
        (f"~~~\n```\n{CALL}\n~~~\n{CALL}", [f"~~~\n```\n{CALL}\n~~~", NOW_CALL]),
        (f"1. so\n   ````\n{CALL}\n```\n{CALL}", [f"1. so\n   ````\n{CALL}\n```\n{CALL}"]),
        (f"```\n{CALL}", [f"```\n{CALL}"]),
        (f"```{OTHER}\nx\n```", [f"```{OTHER}\nx\n```"]),
        (f"`{OTHER}` it is", [f"`{OTHER}` it is"]),
        ("Use `<tool_call>` and `</tool_call>`.\n", ["Use `<tool_call>` and `</tool_call>`.\n"]),
        (f"``x ` {OTHER}``", [f"``x ` {OTHER}``"]),
        (f"`x` {CALL}", ["`x`", NOW_CALL]),
        (f"```x``` {CALL}", ["```x```", NOW_CALL]),
        (f"a ` and {CALL}", ["a ` and", NOW_CALL]),
        (f"a ` and {OTHER}", ["a ` and", OTHER_CALL]),
        (f"a ` and\n{OTHER} `", ["a ` and", OTHER_CALL, "\n `"]),
        (f"a ` and {OTHER} ``\n", ["a ` and", OTHER_CALL, "  ``\n"]),
        # what cannot be read
        ("<tool_call>\n{broken}\n</tool_call>", ["<tool_call>\n{broken}\n</tool_call>"]),
        (f"<tool_call>no</tool_call> so\n{CALL}", ["<tool_call>no</tool_call> so", NOW_CALL]),
        (f"a <tool_call> b {CALL} c", [f"a <tool_call> b {CALL} c"]),
        (f"<tool_call>{CALL}", [f"<tool_call>{CALL}"]),
        (f"<tool_call>{{{CALL}\n{OTHER}", [f"<tool_call>{{{CALL}", OTHER_CALL]),
        (f" <tool_call>no</tool_call>\n{CALL}\n", [" <tool_call>no</tool_call>", NOW_CALL]),
    ],
)
def test_what_is_no_call_is_content(text: str, expected: list[str | Call]) -> None:
    for parts in ([text], *splits(text)):
        assert read(JSON, parts) == expected


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('[{"name": "now", "arguments": {"é": [1.5, null]}}]', '{"é": [1.5, null]}'),
        ('{"name": "now", "arguments": {"a\\ud83d": "x\\ud83dy"}}', '{"a\ufffd": "x\ufffdy"}'),
        ('{"name": "now", "arguments": null}', None),
        ('{"name": "now", "arguments": []}', None),
        ('{"name": "now", "arguments": "x"}', None),
        ('{"name": "now", "arguments": {"a": 1e999}}', None),
        ('{"name": "now", "parameters": {"a": 1}}', None),
        ('{"name": ["now"], "arguments": {}}', None),
        ('{"arguments": {}}', None),
        ("[]", None),
        ("[3]", None),
        ("3", None),
        ('{"a":' * 9999, None),
    ],
)
def test_arguments_are_an_object_in_json(body: str, arguments: str | None) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert read(JSON, [text]) == ([text] if arguments is None else [Call("now", arguments)])


def test_an_argument_may_hold_markers() -> None:
    content = f"a {CALL} b </tool_call> c"
    text = f"<tool_call>{json.dumps({'name': 'write_file', 'arguments': {'content': content}})}</tool_call>."
    for parts in ([text], *splits(text)):
        assert read(JSON, parts) == [Call("write_file", json.dumps({"content": content})), "."]
    # but not without end
    many = text.replace(" c", "</tool_call>" * 40)
    assert read(JSON, [many]) == read(JSON, list(many)) == [many]


def test_a_call_that_is_too_long_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LONGEST", len(CALL) - len("<tool_call></tool_call>"))
    longer = CALL.replace("{}", "{ }")
    for text in (CALL + longer + CALL, longer, longer + " and so on" * 9):
        whole = read(JSON, [text])
        assert whole == read(JSON, list(text))
        assert whole.count(NOW_CALL) == text.count(CALL)
    splitter = Splitter(JSON)
    assert splitter.add(longer) == [longer]
    mistral = "[TOOL_CALLS]now[ARGS]{" + " " * len(CALL) + "}"
    assert read(offer("mistral"), [mistral]) == read(offer("mistral"), list(mistral)) == [mistral]
    assert Splitter(offer("mistral")).add(mistral, last=True) == [mistral]


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("x"), RecursionError(), MemoryError(), AttributeError()]
)
def test_whatever_a_parser_raises(error: Exception) -> None:
    def parse(text: str, tools: Any) -> Any:
        raise error

    assert read(Offer(Syntax(("<",), ">", parse), TOOLS), ["a <b> c"]) == ["a <b> c"]


@pytest.mark.parametrize("result", [None, {}, {"name": "now"}, {1, 2}, [[]], ({"name": "now"},), "now"])
def test_whatever_a_parser_returns(result: Any) -> None:
    one = Offer(Syntax(("<",), ">", lambda text, tools: result), TOOLS)
    expected = ["a", NOW_CALL, "  c"] if result == {"name": "now"} else ["a <b> c"]
    assert read(one, ["a <b> c"]) == expected


@pytest.mark.parametrize("arguments", [{"a": {1, 2}}, {"a": b"x"}, {(1, 2): 3}, {"a": 1j}])
def test_arguments_that_json_cannot_write(arguments: Any) -> None:
    one = Offer(Syntax(("<",), ">", lambda text, tools: {"name": "now", "arguments": arguments}), TOOLS)
    assert read(one, ["<b>"]) == ["<b>"]


def test_a_parser_that_took_too_long_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def parse(text: str, tools: Any) -> Any:
        asked.append(text)
        return json.loads(text)

    monkeypatch.setattr(calls, "PATIENCE", -1.0)
    slow = Offer(replace(JSON.syntax, parse=parse), TOOLS)
    text = f"a <tool_call>b</tool_call> c</tool_call> {CALL}."
    for parts in ([text], *splits(text)):
        asked.clear()
        assert read(slow, parts) == [text]
        assert asked == ["b"]
    assert read(slow, [f"{CALL} {OTHER}"]) == [NOW_CALL, OTHER_CALL]  # these were worth the time


def test_without_parallel_calls_one_ends_the_reply() -> None:
    for text in (f"a {CALL} b {OTHER}", f"a <tool_call>[{CALL[12:-12]}, {OTHER[11:-12]}]</tool_call> b"):
        for parts in ([text], *splits(text)):
            splitter = Splitter(offer("json_tools", parallel=False))
            said = [part for piece in parts for part in splitter.add(piece)]
            assert merged(said + splitter.add("", last=True)) == ["a", NOW_CALL]
            assert splitter.over
    splitter = Splitter(offer("json_tools", parallel=False))
    assert splitter.add("a <tool_call>b</tool_call>", last=True)
    assert not splitter.over


def test_content_is_not_held_longer_than_it_must_be() -> None:
    splitter = Splitter(JSON)
    said = [splitter.add(text) for text in ("a ", "b <to", "ol> c", " `<tool_call>", "x", "`", " d")]
    assert said == [["a"], [" b"], [" <tool> c"], [" `"], [], [], ["<tool_call>x` d"]]


# --- against a reader that has the whole text --------------------------------------------------------


def is_code(before: str, after: str) -> bool:
    """Whether what stands between these two, in a line, is in Markdown's code."""
    *lines, line = before.split("\n")
    fence = ""
    for whole in lines:
        opened = re.match(r"\s*(`{3,}(?=[^`]*$)|~{3,})", whole)
        if not fence:
            fence = opened[1] if opened else ""
        elif re.fullmatch(rf"\s*{fence}{fence[0]}*\s*", whole):
            fence = ""
    if fence or re.match(r"\s*(`{3,}(?=[^`]*$)|~{3,})", line):
        return True
    runs = re.findall("`+", line)
    while runs:
        run = runs.pop(0)
        if run not in runs:
            return run in re.findall("`+", after.partition("\n")[0])
        del runs[: runs.index(run) + 1]
    return False


def expected(text: str) -> list[str | Call]:
    """What `Splitter` says of an answer of json_tools' format."""
    parts: list[str | Call] = []
    begin = at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        at = start + len("<tool_call>")
        if is_code(text[begin:start], text[at:]):
            continue
        body = at
        for end in re.finditer("</tool_call>", text[body:]):
            stop = body + end.start()
            if at > body and "<tool_call>" in text[at:stop]:
                break
            at = body + end.end()
            try:
                entry = json.loads(text[body:stop])
                known = entry["name"] in {"now", "get_weather"}
            except (ValueError, TypeError, KeyError):
                continue
            if known:
                parts += [text[begin:start], Call(entry["name"], json.dumps(entry["arguments"]))]
                begin = at
            break
        else:
            at = len(text) if "<tool_call>" not in text[at:] or at == body else at
    parts.append(text[begin:])
    return trimmed(parts)


def trimmed(parts: list[str | Call]) -> list[str | Call]:
    """Without the whitespace that goes with calls, and the rest of it before content."""
    said: list[str | Call] = []
    gap, spoke, called = "", False, False
    for part in parts:
        if isinstance(part, Call):
            said.append(part)
            called = True
            continue
        gap += part
        if gap.strip():
            gap = gap if spoke or not called else gap.lstrip()
            said.append(gap.rstrip())
            gap, spoke, called = gap[len(gap.rstrip()) :], True, False
    return merged([*said, *([gap] if gap and not called else [])])


FRAGMENTS = [
    *(CALL, OTHER, "<tool_call>", "</tool_call>", "<tool_", "call>", '{"name": "now"', "}", "{}"),
    *("`", "`", "``", "```", "\n```\n", "\n~~~\n", "\n", "\n", " ", "a", "é🙂", "~~~", '"', ", ", "[", "]"),
]


def test_any_answer_in_any_pieces() -> None:
    dice = random.Random(5)
    called = quoted = 0
    for _ in range(2000):
        text = "".join(dice.choices(FRAGMENTS, k=dice.randint(1, 16)))
        want = expected(text)
        for sizes in (iter(lambda: 1, 0), iter(lambda: dice.randint(1, 30), 0), iter(lambda: 999, 0)):
            assert read(JSON, list(pieces(text, sizes))) == want, text
        count = sum(isinstance(part, Call) for part in want)
        called += count > 0
        quoted += count < text.count(CALL) + text.count(OTHER)
        if not count:
            assert "".join(map(str, want)) == text
    assert called > 300
    assert quoted > 100

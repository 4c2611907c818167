"""scripts/check_clients.py and scripts/scripted_model.py, with clients that nobody needs to install."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import check_clients
import pytest
from client_table import Client

SCRIPT = Path(__file__).parents[1] / "scripts" / "scripted_model.py"

READER = """
import json, sys
from urllib.request import Request, urlopen
messages = [{"role": "user", "content": sys.argv[1]}]
path = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
tools = [{"type": "function", "function": {"name": "read_file", "parameters": path}}]
calls = True
while calls:
    body = json.dumps({"model": "<MODEL>", "messages": messages, "tools": tools}).encode()
    request = Request("<URL>/chat/completions", body, {"content-type": "application/json"})
    with urlopen(request) as whole:
        messages.append(json.load(whole)["choices"][0]["message"])
    calls = messages[-1].get("tool_calls")
    for call in calls or []:
        with open(json.loads(call["function"]["arguments"])["path"]) as file:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": file.read()})
print(messages[-1]["content"])
"""
ASK = [[sys.executable, "ask.py", "<PROMPT>"]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a scripted model."""
    command = [sys.executable, "-W", "error", str(SCRIPT), "--port", "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().removeprefix("base URL: ").strip()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_what_clients_managed_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(client: Client, place: check_clients.Place) -> str:
        if client.packages == ("absent",):
            raise check_clients.Skipped("it is not there")
        return "1.0"

    clients = {
        "reader": Client("pip", ("reader",), {"project/ask.py": READER}, turn=ASK, loop=ASK),
        "silent": Client("pip", ("silent",), {"project/ask.py": "print('lost')"}, loop=ASK),
        "broken": Client("pip", ("broken",), {"project/ask.py": "print('oh'); exit(3)"}, turn=ASK),
        "absent": Client("pip", ("absent",), {}, turn=ASK),
    }
    monkeypatch.setattr(check_clients, "CLIENTS", clients)
    monkeypatch.setattr(check_clients, "install", install)
    assert check_clients.main(["--base-url", url, "--client", "reader", "--client", "absent"]) == 0
    reader, absent = capsys.readouterr().out.splitlines()
    assert reader.startswith("reader 1.0: turn (")
    told = re.search(r", tool loop \(2 requests, (\d+) of (\d+) prompt tokens from the cache\), ", reader)
    assert told is not None
    cached, prompts = map(int, told.groups())
    assert prompts / 2 < cached < prompts
    assert reader.endswith(" s, PASS")
    assert absent.endswith("SKIPPED: it is not there")
    assert check_clients.main(["--base-url", url, "--client", "broken", "--client", "silent"]) == 1
    broken, oh, silent, lost = capsys.readouterr().out.splitlines()
    assert broken.endswith(f"FAIL: {sys.executable} ended with 3")
    assert silent.endswith("FAIL: no password")
    assert [oh, lost] == ["    oh", "    lost"]


def test_a_client_leaves_nothing() -> None:
    began = time.monotonic()
    sleep = "import time; time.sleep(120)"
    start = f"""
import os, subprocess, sys
sleeping = [sys.executable, "-c", {sleep!r}]
for more, session in ([], False), ([os.getcwd()], True):
    print(subprocess.Popen([*sleeping, *more], start_new_session=session).pid)
"""
    with check_clients.throw_away() as place:
        pids = check_clients.run([sys.executable, "-c", start], place).split()
        with pytest.raises(check_clients.Failed, match=r"did not end within 0\.5 s"):
            check_clients.run([sys.executable, "-c", sleep], place, limit=0.5)
    assert time.monotonic() - began < 120, "they were waited for"
    assert len(pids) == 2
    for pid in pids:
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False)
        assert state.stdout.strip()[:1] in ("", "Z")
    assert not place.folder.exists()


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"error: no server at 'http://127\.0\.0\.1:9/v1': "):
        check_clients.main(["--base-url", "http://127.0.0.1:9/v1", "--client", "llm"])


def test_a_client_sees_nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    with check_clients.throw_away() as place:
        show = "import os; print(*(f'{name}={value}' for name, value in os.environ.items()), sep='\\n')"
        said = dict(
            line.split("=", 1) for line in check_clients.run([sys.executable, "-c", show], place).split()
        )
        assert "OPENAI_API_KEY" not in said
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR"):
            assert Path(said[name]).is_relative_to(place.folder)
        assert said["https_proxy"] == said["HTTPS_PROXY"] == "http://127.0.0.1:9"
        assert os.environ["PATH"] in said["PATH"]

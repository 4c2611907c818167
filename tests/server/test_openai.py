"""The `openai` package, which most editors and agents speak like."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from server.live import CODE, Live, wait_for

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "# code\n"},
    {"role": "user", "content": [{"type": "text", "text": CODE}]},
]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=MESSAGES, max_completion_tokens=20)
    stream = client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert parts[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == parts[-2].choices[0].finish_reason == "length"
    assert parts[0].choices[0].delta.role == "assistant"


def test_completions_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="any", prompt=CODE, max_tokens=12, logprobs=2)
    parts = list(client.completions.create(model="any", prompt=CODE, max_tokens=12, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 5
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in logprobs.content)


def test_seed_and_stop(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=30, temperature=1.0, **fields
        )

    texts = [ask(seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0][10:13]
    stopped = ask(seed=7, stop=[stop]).choices[0]
    assert stopped.message.content == texts[0][: texts[0].index(stop)]
    assert stopped.finish_reason == "stop"
    plain = ask(seed=7, extra_body={"dflash": {"speculative": False}})
    assert plain.choices[0].message.content == texts[0]


def test_errors_are_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n is not supported") as refused:
        client.chat.completions.create(model="any", messages=MESSAGES, n=2)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "n")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as long:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": CODE * 900}], stream=True
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")


def test_a_key_is_sent_as_it_sends_it(live: Live) -> None:
    with live.beside(api_key="right") as guarded:
        for key in ("right", "wrong"):
            with openai.OpenAI(base_url=guarded.url, api_key=key, max_retries=0) as client:
                if key == "right":
                    assert [model.id for model in client.models.list()] == ["demo"]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


def test_models(client: openai.OpenAI) -> None:
    assert client.models.retrieve("demo").id == "demo"


def test_closing_a_stream_cancels_it(live: Live, client: openai.OpenAI) -> None:
    live.session.watch(pause=0.05)
    stream = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=500, stream=True)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    wait_for(lambda: live.engine.queue["running"] == 0, 5)
    assert live.session.late <= 1


def test_a_full_queue_is_waited_for(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.engine, "max_queue", 0)
    live.session.watch(pause=0.02)
    with openai.OpenAI(base_url=live.url, api_key="unused", max_retries=0) as impatient:
        stream = impatient.chat.completions.create(model="a", messages=MESSAGES, max_tokens=400, stream=True)
        next(iter(stream))
        wait_for(lambda: live.engine.queue["running"] == 1, 10)
        with pytest.raises(openai.RateLimitError):
            impatient.chat.completions.create(model="any", messages=MESSAGES, max_tokens=2)
        stream.close()

"""Chats over HTTP, with the openai package as the client, while an engine samples in a thread."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from engine_data import Opener, assert_exact_logprobs, sampled, trainer_logprobs
from openai import OpenAI
from real_programs import RealRun, until

from peralta_zmq import models, serving
from peralta_zmq.config import Config
from peralta_zmq.engines import Sampler
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Message, Problem, Request, Sampling
from peralta_zmq.serving.chats import MAX_WAITING, ChatQueue
from peralta_zmq.serving.server import ChatServer
from tools.link_proxy import free_ports

KEY = "0123456789abcdef" * 2
HELLO: Any = [{"role": "user", "content": "add 2 to the product of 3 and 4."}]
GREEDY = Sampling(temperature=0.0, max_completion_length=30)


class Scene:
    """A chat server, its engine and clients."""

    def __init__(self, stack: ExitStack, opener: Opener) -> None:
        self.engine = opener.open(models.EMBEDDED, slots=8, max_model_len=128, step=7)
        self.tokenizer = models.load_tokenizer(models.EMBEDDED)
        self.chats = ChatQueue(slots=16, max_model_len=128)
        self._stack, self._is_over, self._may_run = stack, threading.Event(), threading.Event()
        self.num_trained = 0
        self.resume()

    def serve(self, token: str | None = None) -> ChatServer:
        """Start a server on any port and the thread that samples."""
        server = ChatServer(
            self.chats, self.tokenizer, host="127.0.0.1", port=0, token=token, model="demo",
            template_kwargs={},
        )  # fmt: skip
        self._stack.enter_context(closing(server))
        thread = threading.Thread(target=self._sample)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._is_over.set)
        self._stack.callback(self._may_run.set)
        return server

    def pause(self) -> None:
        """Start no further completion."""
        self._may_run.clear()

    def resume(self) -> None:
        self._may_run.set()

    def _sample(self) -> None:
        """Do as a generator's loop."""
        sampler, sampling = Sampler(self.engine, self.tokenizer), Sampling(max_completion_length=9)
        problem = Problem("", "mine", (), "", tuple(self.prompt("add 1 to 2.")))
        while True:
            self._may_run.wait()
            if self._is_over.is_set():
                return
            self.chats.submit_due(sampler)
            while sampler.has_room:
                sampler.start(problem, 1, sampling)
            ended = sampler.advance()
            self.chats.complete(ended)
            self.num_trained += len(ended)

    def prompt(self, text: str) -> list[int]:
        return models.chat_prompt(self.tokenizer, [Message("user", text)])


@pytest.fixture
def scene(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stack: ExitStack,
) -> Scene:
    """With the engine that EVERY_ENGINE names, else the native one."""
    return Scene(stack, Opener(getattr(request, "param", "native"), tmp_path, monkeypatch))


@pytest.fixture
def client_of(stack: ExitStack) -> Callable[..., OpenAI]:
    """A client that does not retry."""

    def open_client(port: int, key: str = "none", **options: Any) -> OpenAI:
        url = f"http://127.0.0.1:{port}/v1"
        options = {"max_retries": 0, "timeout": 30, **options}
        return stack.enter_context(OpenAI(base_url=url, api_key=key, **options))

    return open_client


ClientOf = Callable[..., OpenAI]
EVERY_ENGINE = pytest.mark.parametrize("scene", ["native", "mlx", "vllm"], indirect=True)


@EVERY_ENGINE
def test_reply_is_what_the_engine_samples_with_logprobs_and_usage(
    scene: Scene, client_of: ClientOf
) -> None:
    prompt_ids = np.array(scene.prompt(HELLO[0]["content"]), np.int32)
    (expected,) = sampled(scene.engine, GREEDY, [Request(0, prompt_ids)])
    client = client_of(scene.serve().port)
    assert [model.id for model in client.models.list()] == ["demo"]
    options: Any = {"messages": HELLO, "model": "demo", "temperature": 0, "max_tokens": 30}
    reply = client.chat.completions.create(**options, logprobs=True, top_logprobs=0)
    (choice,) = reply.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert reply.system_fingerprint == "step-7"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    model = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    logprobs = np.array([entry.logprob for entry in choice.logprobs.content], np.float32)
    by_trainer = trainer_logprobs(model, [expected])
    assert_exact_logprobs([replace(expected, logprobs=logprobs)], by_trainer)
    assert reply.usage is not None
    counts = reply.usage.prompt_tokens, reply.usage.completion_tokens
    assert counts == (len(prompt_ids), len(expected.token_ids))

    chunks = list(
        client.chat.completions.create(
            **options, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage == reply.usage and chunks[-1].choices == []
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(delta.delta.content or "" for delta in deltas) == expected.text
    assert deltas[0].delta.role == "assistant"
    assert deltas[-1].finish_reason == expected.finish_reason
    streamed = [each for delta in deltas if delta.logprobs for each in delta.logprobs.content or []]
    assert [each.token for each in streamed] == [each.token for each in choice.logprobs.content]
    assert {chunk.system_fingerprint for chunk in chunks} == {"step-7"}


@EVERY_ENGINE
def test_choices_stop_strings_and_seed_are_honoured(scene: Scene, client_of: ClientOf) -> None:
    client = client_of(scene.serve().port)

    def texts(**options: Any) -> list[str]:
        reply = client.chat.completions.create(
            messages=HELLO, model="demo", max_tokens=20, **options
        )
        return [str(choice.message.content) for choice in reply.choices]

    first = texts(seed=5, n=3, temperature=1.5)
    assert first == texts(seed=5, n=3, temperature=1.5) and len(set(first)) > 1
    (whole,) = texts(temperature=0)
    stop = whole[3:5]
    assert texts(temperature=0, stop=stop) == [whole[: whole.find(stop)]]
    stream = client.chat.completions.create(
        messages=HELLO, model="demo", temperature=0, stop=[stop], stream=True, n=2
    )
    joined = ["", ""]
    for chunk in stream:
        joined[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert joined == [whole[: whole.find(stop)]] * 2


def test_refused_requests_have_the_errors_of_the_api(scene: Scene, client_of: ClientOf) -> None:
    port = scene.serve(token=KEY).port
    client, options = client_of(port, KEY), {"messages": HELLO, "model": "demo"}
    create: Any = client.chat.completions.create
    with pytest.raises(openai.AuthenticationError, match=r"use the one in generator\.token_file"):
        client_of(port, "wrong").models.list()
    with pytest.raises(openai.NotFoundError, match='use "demo"'):
        create(**{**options, "model": "gpt-4"})
    with pytest.raises(openai.BadRequestError, match="top_logprobs is not supported") as caught:
        create(**options, logprobs=True, top_logprobs=3)
    assert (caught.value.param, caught.value.code) == ("top_logprobs", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="unknown request: POST /v1/embeddings"):
        client.embeddings.create(input="a", model="demo")
    with pytest.raises(openai.APIStatusError, match="longer than 1048576 bytes"):
        create(messages=[{"role": "user", "content": "a" * 2**20}], model="demo")

    def post(body: bytes, **headers: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            every = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, {**every, **headers})
            response = connection.getresponse()
            return response.status, json.loads(response.read())["error"]["message"]

    assert post(b"{")[0] == 400
    assert post(b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert "messages: Field required" in post(b"{}", Host="box.lan")[1]


def test_model_is_shown_by_name_and_paths_may_lack_v1(scene: Scene, client_of: ClientOf) -> None:
    client = client_of(scene.serve().port)
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match='"gpt-4" does not exist; use "demo"'):
        client.models.retrieve("gpt-4")
    client = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    assert [model.id for model in client.models.list()] == ["demo"]
    reply = client.chat.completions.create(messages=HELLO, model="demo", max_tokens=3)
    echo: Any = [*HELLO, reply.choices[0].message, *HELLO]  # as clients send it: with all fields
    assert client.chat.completions.create(messages=echo, model="demo", max_tokens=3).choices
    with pytest.raises(openai.NotFoundError, match="unknown request: POST /embeddings"):
        client.embeddings.create(input="a", model="demo")


def test_full_queue_is_a_rate_limit_and_a_hang_up_makes_room(
    scene: Scene, client_of: ClientOf
) -> None:
    scene.pause()
    client = client_of(scene.serve().port, timeout=0.5)
    options: Any = {"messages": HELLO, "model": "demo"}
    with pytest.raises(openai.APITimeoutError):  # the client hangs up
        client.chat.completions.create(**options, n=MAX_WAITING)
    until(lambda: scene.chats.num_waiting == 0)
    stream = client.chat.completions.create(**options, n=MAX_WAITING, stream=True)
    with pytest.raises(openai.RateLimitError, match="32 completions are waiting already"):
        client.chat.completions.create(**options)
    stream.close()
    until(lambda: scene.chats.num_waiting == 0)


def test_interrupted_chats_are_errors_that_clients_retry(scene: Scene, client_of: ClientOf) -> None:
    scene.pause()
    server = scene.serve()
    client, options = client_of(server.port), {"messages": HELLO, "model": "demo"}
    create: Any = client.chat.completions.create
    stream = create(**options, stream=True)
    threading.Timer(0.1, server.close).start()
    with pytest.raises(openai.InternalServerError, match="the run has ended"):
        create(**options)
    with pytest.raises(openai.APIError, match="the run has ended"):
        list(stream)


# Settings.


def test_settings_are_checked_before_the_weights_are_there(tmp_path: Path) -> None:
    missing = {"serve_port": 8471, "token_file": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"generator\.token_file .*none cannot be read"):
        serving.check_settings(Config.model_validate({"generator": missing}))


def test_generators_of_one_machine_serve_chats_on_different_ports(scene: Scene) -> None:
    port = scene.serve().port
    second = ChatServer(
        scene.chats, scene.tokenizer, host="127.0.0.1", port=port, token=None, model="demo",
        template_kwargs={},
    )  # fmt: skip
    with closing(second):
        assert port < second.port < port + 20


# A whole run.


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_run_with_a_chatting_client_loses_nothing(
    tmp_path: Path, client_of: ClientOf, stack: ExitStack
) -> None:
    run, port = stack.enter_context(closing(RealRun(tmp_path))), free_ports()
    trainer = run.trainer("--train.max-steps", "8")
    generator = run.generator("ann", "--generator.serve-port", str(port))
    until(lambda: "chat server: http://127.0.0.1" in generator.printed, generator)
    client, steps = client_of(port), set[str]()
    while trainer.alive:
        try:
            reply = client.chat.completions.create(messages=HELLO, model="run", max_tokens=16)
        except openai.APIError:
            break  # the run has ended
        steps.add(str(reply.system_fingerprint))
        time.sleep(0.01)
    assert trainer.wait() == 0, trainer.printed
    assert generator.wait() == 0, generator.printed
    assert len(steps) > 3
    assert run.broken(max_steps=8) == {}

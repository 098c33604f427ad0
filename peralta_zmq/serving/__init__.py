"""Completions over HTTP: chats in the form of OpenAI's API, and the sessions of agents."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from socket import has_dualstack_ipv6

from peralta_zmq import models
from peralta_zmq.addresses import read_private_token
from peralta_zmq.config import Config
from peralta_zmq.serving.chats import ChatQueue

logger = logging.getLogger(__name__)


def check_settings(config: Config) -> None:
    """Raise ConfigError if the file with the API key cannot be used."""
    if config.generator.serve_port is not None:
        read_private_token(config.generator.token_file, option="generator.token_file")


def open_server(
    config: Config,
    tokenizer: models.Tokenizer,
    stack: ExitStack,
    *,
    max_model_len: int,  # tokens of prompt and completion together
    serves_chats: bool = False,
) -> ChatQueue:
    """The queue of chats and the sessions of agents; starts the server if something needs it.

    Without `serves_chats`, or without generator.serve_port, it listens for the agents of this
    machine only.
    """
    chats = ChatQueue(slots=config.engine.slots, max_model_len=max_model_len)
    chats.sessions.max_turns = config.task.max_turns
    chats.sessions.may_branch = config.task.agent_history == "branch"
    port = config.generator.serve_port if serves_chats else None
    environments = (*config.environments, *config.eval_environments)
    if port is None and not any(env.has_agent for env in environments):
        return chats
    from peralta_zmq.serving.server import ChatServer

    token = None
    if port is not None:
        token = read_private_token(config.generator.token_file, option="generator.token_file")
    server = ChatServer(
        chats,
        tokenizer,
        host="127.0.0.1" if token is None else ("::" if has_dualstack_ipv6() else "0.0.0.0"),
        port=port or 0,
        token=token,
        model=config.run.name,
        template_kwargs=config.data.chat_template_kwargs,
        session_seconds=config.task.agent_timeout,
    )
    stack.enter_context(closing(server))
    if port is not None:
        logger.info("chat server: %s", server.url)
    return chats

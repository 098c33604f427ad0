"""Chats with the newest weights, over HTTP in the form of OpenAI's API."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from socket import has_dualstack_ipv6

from peralta_zmq import models, registry
from peralta_zmq.addresses import read_private_token
from peralta_zmq.config import Config
from peralta_zmq.generator.serving.chats import ChatQueue

logger = logging.getLogger(__name__)


def check_settings(config: Config) -> None:
    """Raise ConfigError if the file with the API key cannot be used."""
    if config.generator.serve_port is not None:
        read_private_token(config.generator.token_file, option="generator.token_file")


def serve_chats(
    config: Config, engine: registry.Engine, tokenizer: models.Tokenizer, stack: ExitStack
) -> ChatQueue:
    """The queue of chats; starts the chat server if generator.serve_port is set."""
    chats = ChatQueue(slots=config.engine.slots, max_model_len=engine.max_model_len)
    if config.generator.serve_port is None:
        return chats
    from peralta_zmq.generator.serving.server import ChatServer

    token = read_private_token(config.generator.token_file, option="generator.token_file")
    server = ChatServer(
        chats,
        tokenizer,
        host="127.0.0.1" if token is None else ("::" if has_dualstack_ipv6() else "0.0.0.0"),
        port=config.generator.serve_port,
        token=token,
        model=config.run.name,
        template_kwargs=config.data.chat_template_kwargs,
    )
    stack.enter_context(closing(server))
    logger.info("chat server: %s", server.url)
    return chats

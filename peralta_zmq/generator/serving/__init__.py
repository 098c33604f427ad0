"""Chats with the newest weights, over HTTP in the form of OpenAI's API.

engine        samples chat completions in slots of the generator's engine, beside its groups
protocol      JSON of requests and replies, and the checks of requests
server        HTTP server: routes, access control, streams
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

from peralta_zmq import models, registry
from peralta_zmq.config import Config
from peralta_zmq.errors import import_extra
from peralta_zmq.generator.serving.engine import ServingEngine
from peralta_zmq.http_server import read_private_token

NEEDED_BY = "generator.serve_port"
logger = logging.getLogger(__name__)


def check_settings(config: Config) -> None:
    """Raise ConfigError if `serve_chats` could not start with these settings."""
    if config.generator.serve_port is not None:
        for library in ("starlette", "uvicorn"):
            import_extra(library, extra="dashboard", needed_by=NEEDED_BY)
        _token(config)


def serve_chats(
    config: Config, engine: registry.Engine, tokenizer: models.Tokenizer, stack: ExitStack
) -> registry.Engine:
    """Start the chat server, which `stack` closes; returns the engine for the generator.

    Returns `engine` itself without generator.serve_port. Raises ConfigError if the port cannot be
    used.
    """
    if config.generator.serve_port is None:
        return engine
    from peralta_zmq.generator.serving.server import ChatServer  # needs optional packages

    serving, token = ServingEngine(engine, slots=config.engine.slots), _token(config)
    server = ChatServer(
        serving,
        tokenizer,
        host="127.0.0.1" if token is None else "0.0.0.0",
        port=config.generator.serve_port + config.generator.index,
        token=token,
        model=config.run.name,
        template_kwargs=config.data.chat_template_kwargs,
    )
    stack.enter_context(closing(server))
    logger.info("chat server: %s", server.url)
    return serving


def _token(config: Config) -> str | None:
    return read_private_token(config.generator.token_file, option="generator.token_file")

"""Engines, which sample completions of prompts (protocol registry.Engine)."""

from peralta_zmq.engines.group_sampler import RequestGroup, Sampler

__all__ = ["RequestGroup", "Sampler"]

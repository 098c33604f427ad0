"""Engines, which sample completions of prompts (protocol registry.Engine)."""

from peralta_zmq.engines.group_sampler import Group, Sampler

__all__ = ["Group", "Sampler"]

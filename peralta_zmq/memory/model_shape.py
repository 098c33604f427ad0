"""Sizes of a language model, computed from its config.json without loading the model.

Letters in formulas: H hidden size, I intermediate size, V vocabulary, A attention heads, K key
heads, D head size, L layers, E experts of a mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peralta_zmq import models
from peralta_zmq.atomic_files import MALFORMED
from peralta_zmq.errors import ConfigError

# Architectures (model_type) whose layers are the one that `ModelShape` describes: attention and a
# gated MLP, with two RMS norms.
KNOWN_TYPES = {"llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}
QUERY_NORM_TYPES = {"qwen3", "qwen3_moe", "gemma3_text"}  # with norms of queries and keys
BIASED_TYPES = {"qwen2", "qwen2_moe"}  # with biases of queries, keys and values in every model
TIED_TYPES = {"smollm3", "gemma", "gemma2", "gemma3_text"}  # tied unless the config says otherwise
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder; `is_known` is False if its layers may differ from the description."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int  # 1 without a mixture of experts
    experts_per_token: int
    is_tied: bool  # the output head has the weight of the embedding
    has_query_norm: bool
    has_bias: bool  # of queries, keys and values
    max_positions: int

    @property
    def is_known(self) -> bool:
        """Whether the sizes are exact for this architecture."""
        return self.model_type in KNOWN_TYPES

    @property
    def query_size(self) -> int:
        """A D, the size of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """K D, the size of a token's keys, and of its values."""
        return self.num_key_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output head that is not tied to it."""
        return self.vocab_size * self.hidden_size

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of one decoder layer, an expert's included."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        query = self.query_size
        key = self.key_size
        attention = ((hidden, query), (hidden, key), (hidden, key), (query, hidden))
        mlp = ((hidden, inner), (hidden, inner), (inner, hidden)) * self.num_experts
        router = ((hidden, self.num_experts),) if self.num_experts > 1 else ()
        return attention + mlp + router

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear layers of all decoder layers, without the output head."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.linear_layers)

    @property
    def largest_linear(self) -> int:
        """Parameters of the largest linear layer, without the output head."""
        return max(inputs * outputs for inputs, outputs in self.linear_layers)

    @property
    def vectors(self) -> int:
        """Parameters of norms and biases."""
        biases = (self.query_size + 2 * self.key_size) * self.has_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.has_query_norm
        return self.num_layers * (norms + biases) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied output head is the embedding."""
        embeddings = self.embedding * (1 if self.is_tied else 2)
        return self.linear_parameters + self.vectors + embeddings

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of all linear layers but the output head."""
        sizes = sum(inputs + outputs for inputs, outputs in self.linear_layers)
        return self.num_layers * rank * sizes

    @property
    def token_cache(self) -> int:
        """Numbers in the keys and values of a token, of all layers."""
        return 2 * self.num_layers * self.key_size


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`.

    Raises ConfigError if its config.json cannot be read or lacks a size.
    """
    path = folder / "config.json"
    try:
        config: Any = models.read_config_file(path)
        if "text_config" in config and "auto_map" not in config:
            config = models.text_config(folder, trust_remote_code=True).to_dict()
        return _shape_of(config.get("text_config") or config, path)
    except (OSError, *MALFORMED) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read ({reason}); copy the model again") from None


def _shape_of(config: dict[str, Any], path: Path) -> ModelShape:
    model_type = str(config.get("model_type", "unknown"))
    for name in NEEDED:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ConfigError(
                f"{path} has no {name}, so the memory of model_type '{model_type}' cannot be "
                "planned; start the trainer to find out whether it fits"
            )
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    inner = config.get("intermediate_size")
    if experts > 1:
        inner = config.get("moe_intermediate_size") or inner
    return ModelShape(
        model_type=model_type,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(inner or 4 * hidden),
        num_heads=heads,
        num_key_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(config["vocab_size"]),
        num_experts=int(experts),
        experts_per_token=int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        is_tied=bool(config.get("tie_word_embeddings", model_type in TIED_TYPES)),
        has_query_norm=model_type in QUERY_NORM_TYPES,
        has_bias=model_type in BIASED_TYPES or bool(config.get("attention_bias", False)),
        max_positions=int(config.get("max_position_embeddings") or 1 << 30),
    )

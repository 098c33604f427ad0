"""Sizes of a language model, counted on the device meta, where tensors have no memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from peralta_zmq import models
from peralta_zmq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, in numbers."""

    model_type: str
    num_layers: int
    hidden_size: int
    inner_size: int  # hidden size of the MLP, or of all experts that compute a token
    num_heads: int  # heads of queries
    query_size: int  # queries of a token
    key_size: int  # keys of a token, and its values
    vocab_size: int
    max_positions: int
    is_tied: bool  # the output head has the weight of the embedding
    num_parameters: int  # with a tied weight once
    layer_parameters: int  # matrices of all layers, without embedding and output head
    vectors: int  # parameters of norms and biases
    adapted: int  # inputs and outputs of all linear layers: parameters of adapters of rank 1

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output head that is not tied to it."""
        return self.vocab_size * self.hidden_size

    @property
    def token_cache(self) -> int:
        """Numbers in the keys and values of a token, of all layers."""
        return 2 * self.num_layers * self.key_size


def read_shape(folder: Path, *, trust_remote_code: bool = False) -> ModelShape:
    """The shape of the model in `folder`, of which only config.json and custom code are read.

    Raises ConfigError if the model cannot be opened, or if its config lacks a size.
    """
    model: Any = models.model_without_memory(folder, trust_remote_code=trust_remote_code)
    config = model.config.get_text_config()
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not getattr(config, name, 0) > 0:
            raise ConfigError(
                f"{folder / 'config.json'} has no {name}, so the memory of model_type "
                f"'{config.model_type}' cannot be planned; start the trainer to find out whether "
                "it fits"
            )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if experts := getattr(config, "num_experts_per_tok", None):
        inner_size = experts * (getattr(config, "moe_intermediate_size", None) or inner_size)
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", embedding)
    weights = [weight for weight in model.parameters() if weight is not embedding]
    linears = [
        module
        for module in cast(nn.Module, model).modules()
        if isinstance(module, nn.Linear) and module.weight is not head
    ]
    return ModelShape(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        inner_size=inner_size,
        num_heads=heads,
        query_size=heads * head_dim,
        key_size=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        vocab_size=config.vocab_size,
        max_positions=models.max_positions(model),
        is_tied=head is embedding,
        num_parameters=model.num_parameters(),
        layer_parameters=sum(w.numel() for w in weights if w.ndim > 1 and w is not head),
        vectors=sum(w.numel() for w in weights if w.ndim == 1),
        adapted=sum(module.in_features + module.out_features for module in linears),
    )

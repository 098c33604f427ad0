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
    settings = config.to_dict()  # an attribute that differs between layers would raise an error

    def size(name: str, default: int | None = None) -> int:
        value = settings.get(config.attribute_map.get(name, name)) or default
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{folder / 'config.json'} has no number for {name}, so the memory of model_type "
                f"'{config.model_type}' cannot be planned; start the trainer to find out whether "
                "it fits"
            )
        return value

    hidden_size = size("hidden_size")
    heads = size("num_attention_heads")
    head_dim = size("head_dim", hidden_size // heads)
    inner_size = size("intermediate_size", 4 * hidden_size)
    inner_size = size("num_experts_per_tok", 1) * size("moe_intermediate_size", inner_size)
    with models.model_loading_errors(f"the memory of {folder} cannot be planned"):
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
        hidden_size=hidden_size,
        inner_size=inner_size,
        num_heads=heads,
        query_size=heads * head_dim,
        key_size=size("num_key_value_heads", heads) * head_dim,
        vocab_size=size("vocab_size"),
        max_positions=models.max_positions(model),
        is_tied=head is embedding,
        num_parameters=model.num_parameters(),
        layer_parameters=sum(w.numel() for w in weights if w.ndim > 1 and w is not head),
        vectors=sum(w.numel() for w in weights if w.ndim == 1),
        adapted=sum(module.in_features + module.out_features for module in linears),
    )

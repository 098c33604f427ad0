"""Language models: loading, device and dtype, chat prompts, token logprobs, LoRA adapters.

`scoring` (the trainer's forward pass over packed rows) and `lora` are imported by their own names.
"""

from peralta_zmq.models.device import (
    DTYPES,
    available_cores,
    choose_device,
    choose_dtype,
    device_name,
    keep_memory,
    training_dtype,
    use_threads,
    worker_info,
)
from peralta_zmq.models.loading import (
    EMBEDDED,
    Model,
    Tokenizer,
    apply_weights,
    chat_prompt,
    check_teacher_vocabulary,
    check_weights,
    companion_files,
    load_model,
    load_tokenizer,
    model_folder,
    new_model,
    text_of,
    weights_of,
)
from peralta_zmq.models.logprobs import entropies, selected_logprobs, token_logprobs

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "Model",
    "Tokenizer",
    "apply_weights",
    "available_cores",
    "chat_prompt",
    "check_teacher_vocabulary",
    "check_weights",
    "choose_device",
    "choose_dtype",
    "companion_files",
    "device_name",
    "entropies",
    "keep_memory",
    "load_model",
    "load_tokenizer",
    "model_folder",
    "new_model",
    "selected_logprobs",
    "text_of",
    "token_logprobs",
    "training_dtype",
    "use_threads",
    "weights_of",
    "worker_info",
]

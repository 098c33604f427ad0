"""Language models: loading, device and dtype, chat templates, logprobs, LoRA.

Import `scorer` (the trainer's forward pass), `lora` (adapters) and `frozen_base` (the model under
adapters) as modules.
"""

# Imports that other packages use as attributes of this package:
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from peralta_zmq.malloc import keep_memory, release_memory
from peralta_zmq.models.chat_templates import (
    chat_prompt,
    chat_prompts,
    check_continuations,
    check_template_kwargs,
    continuation_ids,
    end_of_turn,
)
from peralta_zmq.models.device import (
    DTYPES,
    available_cores,
    choose_device,
    choose_dtype,
    device_name,
    free_bytes,
    is_out_of_memory,
    limit_memory,
    multiplies_bf16_faster,
    total_bytes,
    training_dtype,
    training_dtype_of,
    use_deterministic_operators,
    use_threads,
    worker_info,
)
from peralta_zmq.models.frozen_base import load_teacher
from peralta_zmq.models.model_folders import (
    EMBEDDED,
    EMBEDDED_TURNS,
    Model,
    Tokenizer,
    apply_weights,
    check_code,
    check_weights,
    converted_weights,
    folder_weights,
    forward_options,
    load_model,
    load_tokenizer,
    max_positions,
    model_folder,
    model_loading_errors,
    model_without_memory,
    published_config,
    save_weights,
    text_config,
    text_of,
)
from peralta_zmq.models.published_names import weights_of
from peralta_zmq.models.step_arithmetic import arithmetic, use_arithmetic
from peralta_zmq.models.tokenizers import (
    companion_files,
    end_token_ids,
    end_tokens_text,
    folder_end_ids,
    special_ids,
    tokenizer_changes,
    tokenizer_identity,
)

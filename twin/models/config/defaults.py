"""What a multimodal file leaves out of its language model: it says only what differs from the class.

Source: the configuration classes of transformers by their `model_type`. A file of its own always holds these keys.
"""

from typing import Any

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11_008}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"vocab_size": 32_000, "max_position_embeddings": 2048},
    "mistral": _LLAMA
    | {"intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 131_072},
    "qwen2": _LLAMA | {"intermediate_size": 22_016, "vocab_size": 151_936, "max_position_embeddings": 32_768},
}

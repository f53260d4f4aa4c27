"""Random models of each family, small enough to compute in milliseconds."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 97
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, **_ENDS, num_key_value_heads=2),
    "qwen2": lambda: Qwen2Config(**_SIZES, **_ENDS, num_key_value_heads=3),
    "qwen3": lambda: Qwen3Config(**_SIZES, **_ENDS, num_key_value_heads=2, head_dim=16),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=3, n_head=6, n_positions=512, **_ENDS
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=512,
        word_embed_proj_dim=48,
        **_ENDS,
    ),
}


def tiny(family: str, *, seed: int = 0) -> Any:
    """A model whose logits differ clearly from token to token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3 if "embed" in name or "wte" in name else 0.15)
    return model

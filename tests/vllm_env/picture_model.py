"""Writes the smallest model of vLLM that sees pictures: a BLIP-2 of one layer in each part, with the tiny
model's tokenizer. It has no weights: serve it with `--load-format dummy`. Each picture takes 64 tokens, and
they stand in front of the prompt.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.vllm_env.tiny_model import MAX_TOKENS, VOCABULARY

PICTURE_TOKENS = 64
_LAYER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
_TEXT = {
    **_LAYER,
    "model_type": "opt",
    "vocab_size": VOCABULARY + 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 64,
    "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_FILES: dict[str, dict[str, Any]] = {
    "config.json": {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "image_token_index": VOCABULARY,
        "num_query_tokens": PICTURE_TOKENS,
        "text_config": _TEXT,
        "vision_config": {**_LAYER, "image_size": 56, "patch_size": 14},
        "qformer_config": {**_LAYER, "encoder_hidden_size": 64},
    },
    "preprocessor_config.json": {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": 56, "width": 56},
    },
    "processor_config.json": {"processor_class": "Blip2Processor", "num_query_tokens": PICTURE_TOKENS},
}


def write(folder: Path, *, tiny: Path) -> Path:
    """Write the model into `folder`, which this returns. tiny: the folder of the tiny model."""
    folder.mkdir()
    shutil.copy(tiny / "tokenizer_config.json", folder)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    special = {**tokenizer["added_tokens"][0], "id": VOCABULARY, "content": "<image>"}
    tokenizer["added_tokens"].append(special)
    for name, content in {**_FILES, "tokenizer.json": tokenizer}.items():
        (folder / name).write_text(json.dumps(content))
    return folder

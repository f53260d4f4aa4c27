"""Write a Llama with random weights, its tokenizer and chat template, and two LoRA adapters:
`tiny_model.py FOLDER`.

The model talks nonsense, quickly. What the tests need of it is real: prefix caching, LoRA, chat templates,
and a tokenizer that cuts English at about three characters a token. Weights come from fixed seeds, and the
tokenizer from the English that ships inside Python, so one Python always writes the same files. `environment`
runs this file as a script under the Python of the vLLM environment; the functions import what only that
Python has.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
from pathlib import Path

HIDDEN = 256
LAYERS = 2
HEAD_DIM = 64
HEADS = HIDDEN // HEAD_DIM
KV_HEADS = HEADS // 2
INTERMEDIATE = 2 * HIDDEN
VOCABULARY = 4096
MAX_TOKENS = 8192
LORA_RANK = 8

MODEL = "model"
"""The folder of the base model, inside the one that `write_all` is given."""
ADAPTERS = ("alpha", "beta")
"""The LoRA adapters, each in a folder of its name."""

SPECIAL_TOKENS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "<s>{% if thinking %}Think hard. {% endif %}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}No thoughts, just the answer.{% endif %}"
)

ATTENTION = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
}
MLP = {
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
LORA_TARGETS = ("q_proj", "v_proj")


def write_all(folder: Path) -> None:
    """Write the model and the adapters into `folder`."""
    model = folder / MODEL
    model.mkdir(parents=True)
    write_config(model)
    write_tokenizer(model)
    write_weights(model)
    for seed, name in enumerate(ADAPTERS, start=1):
        write_adapter(folder / name, seed=seed)


def write_config(folder: Path) -> None:
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": MAX_TOKENS,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": SPECIAL_TOKENS.index("<s>"),
            "eos_token_id": SPECIAL_TOKENS.index("</s>"),
        },
    )


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer, so that it can encode every text, trained on Python's own
    help pages.
    """
    from tokenizers import (  # noqa: PLC0415 - only where the file is written
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    topics = pydoc_data.topics.topics
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the training text gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": MAX_TOKENS,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_weights(folder: Path) -> None:
    import numpy as np  # noqa: PLC0415 - beside what is only in the vLLM environment
    from safetensors.numpy import (  # noqa: PLC0415 - only in the vLLM environment
        save_file,
    )

    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (ATTENTION | MLP).items()}
        norms += [f"model.layers.{layer}.{name}" for name in NORMS]
    tensors = {
        f"{name}.weight": 0.05 * random.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": np.ones(HIDDEN, dtype=np.float32) for name in norms}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_adapter(folder: Path, *, seed: int) -> None:
    """Write one adapter in PEFT's format, strong enough to change the model's answers."""
    import numpy as np  # noqa: PLC0415 - only in the vLLM environment
    from safetensors.numpy import save_file  # noqa: PLC0415 - only in the vLLM environment

    folder.mkdir(parents=True)
    _write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": MODEL,
            "r": LORA_RANK,
            "lora_alpha": 2 * LORA_RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(LORA_TARGETS),
            "fan_in_fan_out": False,
            "inference_mode": True,
        },
    )
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for target in LORA_TARGETS:
            rows, columns = ATTENTION[f"self_attn.{target}"]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for half, shape in (("lora_A", (LORA_RANK, columns)), ("lora_B", (rows, LORA_RANK))):
                tensors[f"{prefix}.{half}.weight"] = 0.3 * random.standard_normal(shape, dtype=np.float32)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))

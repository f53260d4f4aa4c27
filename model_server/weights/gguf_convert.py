"""Converts a quantised GGUF file into a transformers folder: half-precision safetensors, tokenizer, chat
template.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from model_server.weights.cache import WeightsError


def convert(gguf: Path, folder: Path) -> None:
    """Write the model into `folder`. Raise WeightsError if the file does not hold the whole model."""
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config)
    # `from_pretrained` would load the tensors too, but only with the package accelerate.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - set(model.all_tied_weights_keys):
        raise WeightsError(f"{gguf.name} does not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

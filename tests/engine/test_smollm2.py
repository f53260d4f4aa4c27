"""The default real model, from its wheel: it computes what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_server.core.request import Request
from model_server.runners.hf import model as hf
from model_server.text.language import ChatMessage
from model_server.text.pretrained import PretrainedLanguage
from model_server.weights.known import SMOLLM2, find
from tests.engine.harness import check_against_plain, engine_around, named_request
from tests.harness.engine_requests import run_to_end

CONVERSATION = [
    ChatMessage("system", "You answer in one short sentence."),
    ChatMessage("user", "What is the capital of France?"),
]


@pytest.fixture(scope="module")
def smollm2_folder() -> Path:
    return find(SMOLLM2, progress=print)


@pytest.fixture(scope="module")
def module(smollm2_folder: Path) -> Any:
    return hf.load(smollm2_folder, device=torch.device("cpu"), dtype=torch.float32)


def test_a_second_search_finds_the_files_that_the_first_one_made(smollm2_folder: Path) -> None:
    lines: list[str] = []
    assert find(SMOLLM2, progress=lines.append) == smollm2_folder
    assert not lines
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in smollm2_folder.iterdir()
    }


def test_it_answers_a_conversation_with_the_plain_models_logits(smollm2_folder: Path, module: Any) -> None:
    """Three requests share a beginning. They are computed in chunks of 24 tokens, in the same steps."""
    language = PretrainedLanguage(smollm2_folder)
    plain = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    engine, runner = engine_around(module, budget=24)
    prompt = language.encode_chat(CONVERSATION)
    first = named_request("first", prompt, max_tokens=8)
    run_to_end(engine, first)
    others = [
        named_request(name, language.encode_chat([CONVERSATION[0], ChatMessage("user", text)]), max_tokens=3)
        for name, text in (("river", "What is the longest river?"), ("sum", "What is two and two?"))
    ]
    run_to_end(engine, *others)
    assert all((request.num_cached_tokens or 0) >= 8 for request in others)
    check_against_plain(runner, plain, [first, *others], atol=2e-3)
    assert "Paris" in answer_text(language, first)


def answer_text(language: PretrainedLanguage, request: Request) -> str:
    text = language.detokenizer(request.token_ids[: request.num_prompt_tokens])
    return "".join(text.feed(token) for token in request.token_ids[request.num_prompt_tokens :])


def test_an_answer_ends_with_the_models_own_end_marker(smollm2_folder: Path) -> None:
    language = PretrainedLanguage(smollm2_folder)
    [end] = language.eos_token_ids
    assert language.decode([end]) == "<|im_end|>"

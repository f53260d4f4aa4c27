"""LoRA adapters, several in one batch, compared with models whose weights have the adapter merged in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_server.core.request import Adapter
from model_server.runners.hf.errors import AdapterError
from model_server.runners.hf.lora import AdapterBank, LowRank
from model_server.runners.hf.packed import pack
from tests.engine.harness import check_against_plain, engine_around, named_request, tokens
from tests.engine.tiny_models import tiny
from tests.harness.engine_requests import run_to_end

RANK = 4
TARGETS = {
    "llama": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "opt": ("self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj"),
    "gpt2": ("attn.c_attn", "attn.c_proj"),
}


def projections(module: Any, family: str) -> dict[str, Any]:
    return {name: layer for name, layer in module.named_modules() if name.endswith(TARGETS[family])}


def write_adapter(folder: Path, module: Any, family: str, *, seed: int, **config: Any) -> Adapter:
    """Write a random adapter in PEFT's format, for the attention projections of every layer."""
    folder.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in projections(module, family).items():
        shape = tuple(layer.weight.shape)
        inputs, outputs = shape if family == "gpt2" else shape[::-1]
        for half, size in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            tensors[f"base_model.model.{name}.{half}.weight"] = 0.3 * torch.randn(size, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    return Adapter(folder.name, str(folder))


def merged(module: Any, family: str, adapter: Adapter, *, scale: float = 6 / RANK) -> Any:
    tensors = load_file(Path(adapter.path) / "adapter_model.safetensors")
    found = copy.deepcopy(module)
    with torch.no_grad():
        for name, layer in projections(found, family).items():
            down, up = (tensors[f"base_model.model.{name}.{half}.weight"] for half in ("lora_A", "lora_B"))
            delta = scale * (up @ down)
            layer.weight += delta.T if family == "gpt2" else delta
    return found


@pytest.mark.parametrize("family", TARGETS)
def test_one_batch_serves_base_and_two_adapters_each_with_its_own_logits(family: str, tmp_path: Path) -> None:
    module = tiny(family)
    adapters = [write_adapter(tmp_path / name, module, family, seed=n) for n, name in enumerate("ab")]
    plains = [copy.deepcopy(module), *(merged(module, family, adapter) for adapter in adapters)]
    pack(module)
    engine, runner = engine_around(module, budget=40)
    for adapter in adapters:
        runner.model.adapters.load(adapter)
    prompt = tokens(30, seed=1)
    requests = [
        named_request(f"{name}-{turn}", prompt + tokens(turn * 5, seed=turn), adapter=adapter)
        for turn in (0, 1)
        for name, adapter in zip(("base", "a", "b"), (None, *adapters), strict=True)
    ]
    for request in requests:
        engine.add(request)
    run_to_end(engine)
    runner.model.adapters.check_integrity()
    together = [{chunk.request.adapter for chunk in plan.chunks} for plan in runner.steps]
    assert {None, *adapters} in together, "the three never computed in one step"
    for plain, request in zip(plains * 2, requests, strict=True):
        check_against_plain(runner, plain, [request])
    answers = {tuple(request.token_ids[30:]) for request in requests[:3]}
    assert len(answers) == 3
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 24, 24, 24]


def test_an_adapter_that_was_unloaded_stays_for_its_last_requests(tmp_path: Path) -> None:
    module = tiny("llama")
    one, two = (write_adapter(tmp_path / name, module, "llama", seed=n) for n, name in enumerate("ab"))
    plain = merged(module, "llama", one)
    engine, runner = engine_around(module)
    bank = runner.model.adapters
    bank.load(one)
    request = named_request("last", tokens(20, seed=1), adapter=one)
    engine.add(request)
    engine.step(now=0.0)
    bank.unload(one, in_use={one})
    run_to_end(engine)
    check_against_plain(runner, plain, [request])
    bank.load(two)
    bank.unload(two, in_use=())
    assert len(bank) == 0
    bank.check_integrity()


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(tmp_path: Path) -> None:
    module = tiny("llama")
    adapter = write_adapter(tmp_path / "a", module, "llama", seed=1, use_rslora=True)
    plain = merged(module, "llama", adapter, scale=6 / RANK**0.5)
    engine, runner = engine_around(module)
    runner.model.adapters.load(adapter)
    request = named_request("one", tokens(20, seed=1), adapter=adapter)
    engine.add(request)
    run_to_end(engine)
    check_against_plain(runner, plain, [request])


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path,
) -> None:
    class Overtaken(AdapterBank):
        def _read(self, folder: Path) -> dict[str, LowRank]:
            parts = super()._read(folder)
            write_adapter(folder, module, "llama", seed=2)
            return parts

    module = tiny("llama")
    adapter = write_adapter(tmp_path, module, "llama", seed=1)
    bank = Overtaken(module)
    with pytest.raises(AdapterError, match="changed while it was read"):
        bank.load(adapter)
    assert len(bank) == 0
    bank.load(adapter)
    bank.check_integrity()
    assert len(bank) == 1


def test_file_that_changed_in_place_is_refused_until_its_old_bytes_return(tmp_path: Path) -> None:
    module = tiny("llama")
    adapter = write_adapter(tmp_path / "a", module, "llama", seed=1)
    bank = AdapterBank(module)
    bank.load(adapter)
    bank.unload(adapter, in_use=())
    write_adapter(tmp_path / "a", module, "llama", seed=2)
    with pytest.raises(AdapterError, match="from another path"):
        bank.load(adapter)
    write_adapter(tmp_path / "a", module, "llama", seed=1)
    bank.load(adapter)
    assert len(bank) == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "not a LoRA adapter"),
        ({"r": 0}, "the rank 0"),
        ({"lora_alpha": None}, "no usable r and lora_alpha"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_adapters_that_would_be_computed_wrongly_are_refused(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    module = tiny("llama")
    adapter = write_adapter(tmp_path / "a", module, "llama", seed=1, **config)
    bank = AdapterBank(module)
    with pytest.raises(AdapterError, match=says):
        bank.load(adapter)
    assert len(bank) == 0
    bank.check_integrity()


def test_an_adapter_of_another_model_or_none_at_all_is_refused(tmp_path: Path) -> None:
    bank = AdapterBank(tiny("llama"))
    with pytest.raises(AdapterError, match="is for another model"):
        bank.load(write_adapter(tmp_path / "a", tiny("gpt2"), "gpt2", seed=1))
    with pytest.raises(AdapterError, match="is for another model"):
        bank.load(write_adapter(tmp_path / "b", tiny("qwen3"), "llama", seed=1))
    with pytest.raises(AdapterError, match="is not an adapter"):
        bank.load(Adapter("c", str(tmp_path / "nothing")))

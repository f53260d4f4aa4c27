"""The settings that the flags of `model-server serve` give."""

import argparse
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from model_server import serve_flags
from model_server.core.cache_options import CacheOptions
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings, HfSettings
from model_server.server.serve import Server, ServerSettings
from model_server.tiers.placement import SCORES, by_product
from model_server.tiers.settings import KvStoreSettings, SelectionSettings

STORE = ("--runner", "hf", "--kv-store", "/var/kv")


def settings(*flags: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    serve_flags.add_flags(parser)
    return serve_flags.settings(parser.parse_args(flags))


def test_without_flags_every_cache_option_is_the_default() -> None:
    assert settings().cache == CacheOptions()
    assert settings().backend == CostSettings(costs=CostModel())


def test_every_cache_option_has_a_flag() -> None:
    flags = (
        *(
            "--prefix-caching-hash-algo",
            "sha256_cbor",
            "--hash-seed",
            "7",
            "--eviction",
            "lfu",
        ),
        *("--partial-blocks", "--max-unused-blocks", "5", "--preallocated-blocks", "2"),
    )
    wanted = CacheOptions(
        hash_algorithm="sha256_cbor",
        hash_seed="7",
        eviction="lfu",
        partial_blocks=True,
        max_unused_blocks=5,
        preallocated_blocks=2,
    )
    found = settings(*flags).cache
    assert found == wanted
    default = CacheOptions()
    assert all(getattr(found, name) != getattr(default, name) for name in CacheOptions.__dataclass_fields__)


def test_a_cost_file_is_read_back_and_flags_override_it(tmp_path: Path) -> None:
    costs = CostModel(prefill_tokens_per_s=123.0, decode_step_s=0.5, interference=0.0)
    file = tmp_path / "costs.yaml"
    figures = {name: value for name, value in asdict(costs).items() if name != "speed"}
    file.write_text(yaml.safe_dump({"costs": figures, "source": {"url": "http://x"}}))
    assert settings("--cost", str(file)).backend == CostSettings(costs=costs)
    backend = settings("--cost", str(file), "--decode-step-ms", "20", "--speed", "2").backend
    assert isinstance(backend, CostSettings)
    assert (backend.costs.decode_step_s, backend.costs.speed) == (0.02, 2.0)
    assert backend.costs.prefill_tokens_per_s == 123.0


@pytest.mark.parametrize(
    "text", ["", "a: [\n", "costs: 5", "costs: {speeed: 1}", "costs: {speed: -1}", "{", "what: 1"]
)
def test_a_file_that_holds_no_costs_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.yaml is not a file of costs") as refused:
        settings("--cost", str(file))
    assert "\n" not in str(refused.value)


def test_the_hf_runner_has_a_default_model() -> None:
    found = settings("--runner", "hf", "--device", "cpu", "--threads", "3")
    assert found.model == "smollm2"
    assert found.backend == HfSettings(device="cpu", threads=3)
    assert settings().model == "made-up"


def test_the_prompt_cache_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert Server(settings()).engine.prompt_cache is None
    asked = Server(settings("--prompt-cache-size", "5")).engine
    assert asked.config.prompt_cache_entries == 5
    assert asked.prompt_cache is not None
    with pytest.raises(ValueError, match="prompt-cache-size must not be negative"):
        settings("--prompt-cache-size", "-1")
    with pytest.raises(ValueError, match="cannot be used together"):
        settings("--runner", "hf", "--prompt-cache-size", "5", "--kv-store", str(tmp_path))


def test_the_flags_of_the_kv_store_set_its_settings() -> None:
    assert settings("--runner", "hf").kv_store is None
    assert settings(*STORE).kv_store == KvStoreSettings(folder=Path("/var/kv"))
    sizes = ("--kv-store-size", "2", "--kv-store-cpu-size", "0.5", "--kv-store-device-size", "0.25")
    shares = ("--kv-store-ratio", "0.5", "--kv-store-chunk-share", "1")
    assert settings(*STORE, *sizes, *shares).kv_store == KvStoreSettings(
        folder=Path("/var/kv"),
        size_bytes=2_000_000_000,
        cpu_bytes=500_000_000,
        device_bytes=250_000_000,
        ratio=0.5,
        chunk_share=1.0,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*STORE, "--runner", "cost"), "--runner hf"),
        ((*STORE, "--no-prefix-caching"), "switched off"),
        ((*STORE, "--partial-blocks"), "full blocks only"),
        ((*STORE, "--kv-store-size", "0"), "over 0"),
        ((*STORE, "--kv-store-cpu-size", "-1"), "may be negative"),
        ((*STORE, "--kv-store-ratio", "0"), "over 0 and at most 1"),
        ((*STORE, "--kv-store-ratio", "1.5"), "over 0 and at most 1"),
        ((*STORE, "--kv-store-device-size", "1"), "under 1"),
        ((*STORE, "--kv-store-chunk-share", "0"), "over 0 and at most 1"),
        (("--kv-transfer", "--runner", "hf"), "--runner cost"),
        (("--kv-transfer", "--no-prefix-caching"), "switched off"),
        (("--kv-transfer", "--partial-blocks"), "full blocks only"),
        (("--kv-transfer", "--kv-transfer-rate", "0"), "must be positive"),
        (("--runner", "hf", "--lora", "x=/x"), "give --runner cost"),
        (("--runner", "hf", "--allow-runtime-lora-updating"), "give --runner cost"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(*flags)


def test_the_documents_ways_to_keep_and_choose_are_selectable() -> None:
    """Rows 002-1 to 002-4: the score, the probed heads, the threshold's exponent, the size of a chunk."""
    store = ("--runner", "hf", "--kv-store", "x", "--kv-store-ratio", "0.25")
    found = settings(*store, "--kv-store-score", "product", "--kv-store-probe-heads", "2").kv_store
    assert found is not None
    assert SCORES[found.score] is by_product
    flags = ("--kv-store-alpha", "0.5", "--kv-store-chunk-tokens", "8", "--kv-store-chunk-share", "1")
    found = settings(*store, *flags).kv_store
    assert found is not None
    assert found.selection is not None
    assert found.selection.cache_key == SelectionSettings(ratio=0.25, alpha=0.5, chunk_share=1.0).cache_key
    assert (found.score, found.chunk_tokens) == ("uses", 8)
    for wrong in (("--kv-store-probe-heads", "0"), ("--kv-store-alpha", "2")):
        with pytest.raises(ValueError, match=r"(probe_heads|alpha) must be"):
            settings(*store, *wrong)

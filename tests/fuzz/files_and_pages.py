"""Input from files and pages: a model server's metrics and models, the endpoints file, the policy file."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from epp.base.errors import ConfigError
from epp.config.policy import Policy, load_policy
from epp.sources.files.endpoints_file import load_endpoints
from epp.sources.scraping.metrics_page import MetricsError, PageReader, parse_page
from epp.sources.scraping.model_lists import MOST_CARDS, parse_model_page
from tests.fuzz.behind import SMALL, A, BeforePicker, OfBytes
from tests.fuzz.trees import as_json, as_yaml

DATA = Path(__file__).parents[1] / "contract" / "data"
HEAD = b"apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: p}\n"
SHORT_PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="x,y",waiting_lora_adapters=""} 1.7e9
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
"""


class MetricsPages(BeforePicker, OfBytes):
    """A model server's metrics page, as the scraper reads it."""

    words: Sequence[bytes] = (
        *(
            b"vllm:num_requests_running",
            b"vllm:cache_config_info{",
            b'block_size="',
            b'num_gpu_blocks="',
            b"# TYPE ",
        ),
        *(
            b"vllm:lora_requests_info{",
            b'running_lora_adapters="',
            b"sglang:num_running_reqs 1\n",
            b"sglang:page_size 1e15\n",
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        pages = [path.read_bytes() for path in sorted(DATA.glob("metrics_*.txt"))]
        self.seeds: Sequence[bytes] = [page[:3_000] for page in pages] + [SHORT_PAGE] * 3
        self.seeds = [*self.seeds, SHORT_PAGE.replace(b"4096", b"9" * 14)]
        self._reader = PageReader()

    async def feed(self, data: bytes) -> bool:
        now = next(self._now)
        try:
            metrics = self._reader.read(data, scraped_at=now)
        except MetricsError:
            self._picker.news.observe(A, None, now=now)
            return False
        self._picker.news.observe(A, metrics, now=now)
        assert metrics == parse_page(data, scraped_at=now)
        assert self._reader.read(data, scraped_at=now) == metrics, "the same page again"
        assert metrics.capacity_tokens is None or 0 < metrics.capacity_tokens <= 2**36
        assert len(metrics.active_adapters) <= 4_096
        return True


class ModelPages(BeforePicker):
    """A model server's list of its models."""

    words: Sequence[bytes] = (
        b'"data":',
        b'"id":"m"',
        b'"parent":"m"',
        b'"root":',
        b'"created":1e400',
        b'"id":""',
    )
    encode = staticmethod(as_json)

    def __init__(self) -> None:
        super().__init__()
        card = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm", "root": "/m", "parent": None}
        adapter = card | {"id": "sql", "parent": "m", "max_model_len": 4096}
        self.documents: Sequence[object] = [
            {"object": "list", "data": [card]},
            {"object": "list", "data": [card, adapter, adapter | {"id": "x"}]},
        ]
        self.seeds: Sequence[bytes] = [self.encode(document) for document in self.documents]

    async def feed(self, data: bytes) -> bool:
        try:
            listed = parse_model_page(data)
        except MetricsError:
            return False
        self._picker.news.take_lists({A: listed}, now=next(self._now))
        assert len(listed.cards) <= MOST_CARDS
        return True

    async def check(self) -> None:
        listed = self._picker.fleet.served.model_list()
        assert listed is None or json.loads(listed)["data"]
        await super().check()


class EndpointsFile(BeforePicker):
    """The endpoints file."""

    words: Sequence[bytes] = (
        b"endpoints:",
        b"name:",
        b"address:",
        b'"10.0.0.9:1"',
        b"adapters: [x]",
        b"kv_events: tcp://a:1",
    )
    encode = staticmethod(as_yaml)

    def __init__(self) -> None:
        super().__init__()
        entries = [
            {"name": n, "address": f"10.0.0.{i}:8000", "model": "m", "adapters": ["x"]}
            for i, n in enumerate("abc")
        ]
        self.documents: Sequence[object] = [
            {"endpoints": entries},
            {"endpoints": [entries[0] | {"port": 1, "labels": {"zone": "b"}}]},
        ]
        self.seeds: Sequence[bytes] = [
            yaml.safe_dump({"endpoints": entries}).encode(),
            b'endpoints: [{name: a, address: "[fd00::1]:80", labels: {zone: b}, kv_events: tcp://10.0.0.1:5557}]\n',
            b"endpoints: []\n",
        ]

    async def feed(self, data: bytes) -> bool:
        try:
            endpoints = load_endpoints(data, source="e.yaml").endpoints
        except ConfigError:
            return False
        self._picker.news.set_endpoints(endpoints, now=next(self._now))
        return True


class PolicyFile(BeforePicker):
    """The policy file."""

    words: Sequence[bytes] = (
        b"spec:",
        b"rule: session",
        b"mode: DryRun",
        b"chunks: {sizeBytes: 16}",
        b"table: {}",
        b"load: {}",
    )
    encode = staticmethod(as_yaml)

    def __init__(self) -> None:
        super().__init__()
        document = msgspec.yaml.encode(SMALL)
        self.documents: Sequence[object] = [msgspec.yaml.decode(msgspec.yaml.encode(SMALL))]
        self.seeds: Sequence[bytes] = [
            document,
            HEAD + b"spec: {rule: affinity, chunks: {sizeBytes: 512}}\n",
            HEAD,
        ]

    async def feed(self, data: bytes) -> bool:
        try:
            policy: Policy = load_policy(data, source="p.yaml")
        except ConfigError:
            return False
        self._picker.set_policy(policy)
        self._picker.set_dry_run(policy)
        return True

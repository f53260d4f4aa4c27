"""Reads the few numbers that routing needs from a model server's metrics page.

`metric_names` has the names that servers give to these numbers. The page shows which server it is, so a pool
may contain several kinds. This is a scan, not a parser of the exposition format: it jumps from one `#
TYPE` line to the next and reads only the families that it knows, since most of a 70 KB page is histogram
buckets that routing does not need. A page written without `# TYPE` lines is read by jumping from one known
namespace to the next instead.

The page may be any bytes. If it cannot be trusted, the result is a MetricsError and never a zero: a page of
another program, a load gauge that is not a number, more lines than any server writes. Called by `scraper` and
by the contract tests.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from epp.base.types import EndpointMetrics
from epp.sources.scraping.metric_names import FAMILIES, KNOWN, NAMES, NAMESPACES


class MetricsError(Exception):
    """The page says nothing reliable about a model server's load."""


_TYPE: Final = b"\n# TYPE "
_HEAD_BYTES: Final = 16_384
"""The first line of interest must be within these bytes. A server writes some 3 KB before it."""
_SAMPLE: Final = re.compile(
    # This matches the part after the name: labels in braces (quotes may hold anything, escaped quotes too),
    # and the value. A timestamp may follow. The pattern is possessive, so a line of broken quotes costs one
    # pass, and not one for each way to split the line.
    rb'(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?[ \t]+([^ \t\r]+)'
)
_LABEL: Final = re.compile(rb'([a-zA-Z_]\w*+)="((?:[^"\\]++|\\.)*+)"')
_MAX_LINES: Final = 20_000
"""Most lines that are read in one page: thirty times as many as vLLM writes, and at worst some tens of
milliseconds of the event loop. Lines of foreign families are skipped and do not count, but for `# TYPE`."""
_MAX_VALUE: Final = 1e15
"""No counter of tokens or seconds reaches this in a server's life. Larger numbers are garbage, and floats
would lose whole units."""
_MAX_BLOCK_TOKENS: Final = 2**20
_MAX_CAPACITY_TOKENS: Final = 2**36
"""Largest cache of a server: a thousand times the largest cache today. A larger number is garbage and would
not fit into its array."""
_MAX_DIGITS: Final = 15
_MAX_SLOTS: Final = 65_536
_MAX_ADAPTERS: Final = 4_096
"""Most adapters with requests that are read from one page."""
_MAX_NAME_BYTES: Final = 1_024
"""Longest name of an adapter. Longer ones are ignored. The endpoints file has the same bound."""
_MAX_LINE_BYTES: Final = 65_536
_QUEUES: Final = ("waiting", *(field for field in NAMES if field.startswith("queued_")))
_MAX_LABELLED: Final = 64
"""Most samples that are read of a family whose gauges differ in a label."""


class _Sample(NamedTuple):
    labels: bytes
    value: float


_Samples = dict[bytes, list[_Sample]]


def parse_page(page: bytes | bytearray, *, scraped_at: float) -> EndpointMetrics:
    """Return the numbers of `page`, added up over its engines. Raises MetricsError if it is not a model
    server's page, or if its load is unreadable.
    """
    found = _PageSamples(_collect(page))
    block_size, capacity = found.cache()
    max_lora, active = found.lora()
    return EndpointMetrics(
        scraped_at=scraped_at,
        running=found.load("running"),
        waiting=found.waiting(),
        kv_usage=found.kv_usage(),
        capacity_tokens=capacity,
        block_size=block_size,
        prompt_tokens=found.total("prompt_tokens"),
        cached_prompt_tokens=found.total("cached_prompt_tokens"),
        generated_tokens=found.total("generated_tokens"),
        counts_at_end=found.counts_at_end,
        prefix_queries=found.total("prefix_queries"),
        prefix_hits=found.total("prefix_hits"),
        finished=found.total("finished"),
        ttft_sum_s=found.total("ttft_sum"),
        ttft_count=found.total("ttft_count"),
        max_lora=max_lora,
        active_adapters=active,
        loaded_adapters=found.loaded_adapters(),
        models=found.models(),
        asleep=found.asleep(),
    )


class PageReader:
    """Reads the pages of one server.

    An idle server writes the same page each time, but for numbers of its process (CPU, memory, garbage
    collections), which stand before the first line that is read. A page that is equal from there on is not
    parsed again. The reader remembers a hash of the part and not the part: a page has 70 KB.
    """

    def __init__(self) -> None:
        self._last: tuple[int, EndpointMetrics] | None = None

    def read(self, page: bytes | bytearray, *, scraped_at: float) -> EndpointMetrics:
        """Return the same as `parse_page`."""
        digest = xxh3_64_intdigest(memoryview(page)[_unread_bytes(page) :])
        if self._last is not None and self._last[0] == digest:
            return replace(self._last[1], scraped_at=scraped_at)
        metrics = parse_page(page, scraped_at=scraped_at)
        self._last = digest, metrics
        return metrics


class _PageSamples:
    """The samples of one page by meaning, with every series. Unreadable values are NaN until asked for."""

    def __init__(self, samples: _Samples) -> None:
        self.counts_at_end = b"sglang:generation_tokens_total" in samples
        self._by_field: dict[str, Sequence[_Sample]] = {}
        for field, names in NAMES.items():
            for name in names:
                series = _series(samples, name)
                if series:
                    self._by_field[field] = series
                    break

    def load(self, field: str) -> int | None:
        """Return a gauge of requests, over all engines. None: the page lacks it. If it is there and
        unreadable, the scrape fails.
        """
        values = self._of_engines(field)
        if any(math.isnan(v) for v in values):
            raise MetricsError(f"{field} requests are not a number")
        return int(sum(values)) if values else None

    def waiting(self) -> int | None:
        """Return the requests in all queues. None: the page has none of these numbers."""
        queues = [found for field in _QUEUES if (found := self.load(field)) is not None]
        return sum(queues) if queues else None

    def kv_usage(self) -> float | None:
        """Return the mean over the engines. Inside the server, requests go to the emptier engine, so one
        full engine does not mean a full server.
        """
        values = self._of_engines("kv_usage")
        if any(math.isnan(v) for v in values):
            raise MetricsError("KV cache usage is not a number")
        return min(1.0, sum(values) / len(values)) if values else None

    def total(self, field: str) -> float | None:
        """Return a counter over all engines, models and reasons. None: it is absent, or partly unreadable."""
        series = self._by_field.get(field)
        if not series:
            return None
        total = math.fsum(sample.value for sample in series)
        return None if math.isnan(total) else total

    def cache(self) -> tuple[int | None, int | None]:
        """Return (block size, capacity in tokens of all engines together). None: the page does not say."""
        size: int | None = None
        engines: dict[bytes, int] = {}
        for sample in self._by_field.get("cache_config", ()):
            labels = _labels(sample.labels)
            size = _whole(labels.get(b"block_size") or labels.get(b"page_size"), most=_MAX_BLOCK_TOKENS)
            blocks = _whole(labels.get(b"num_gpu_blocks") or labels.get(b"num_pages"))
            tokens = _whole(labels.get(b"kv_cache_size_tokens")) or (
                blocks * size if blocks and size else None
            )
            if tokens:
                engines[_rank(labels)] = tokens
        pages = [v for v in self._of_engines("page_size") if 1 <= v <= _MAX_BLOCK_TOKENS]
        pool = [v for v in self._of_engines("pool_tokens") if v >= 1]
        if pages and not pool:
            pool = [v * pages[0] for v in self._of_engines("pool_blocks") if v >= 1]
        capacity = int(sum(pool)) if pool else sum(engines.values())
        known = 0 < capacity <= _MAX_CAPACITY_TOKENS
        return size or (int(pages[0]) if pages else None), capacity if known else None

    def lora(self) -> tuple[int | None, frozenset[str]]:
        """Return (adapter slots of one engine, adapters with requests). Old label sets stay on the page, so
        the newest label set counts.
        """
        newest: dict[bytes, tuple[float, dict[bytes, bytes]]] = {}
        for sample in self._by_field.get("lora", ()):
            labels = _labels(sample.labels)
            engine = _rank(labels)
            if sample.value >= newest.get(engine, (0.0, labels))[0]:
                newest[engine] = (sample.value, labels)
        active: set[str] = set()
        slots = [int(v) for v in self._of_engines("lora_slots") if 1 <= v <= _MAX_SLOTS]
        for _, labels in newest.values():
            for key in (b"running_lora_adapters", b"waiting_lora_adapters"):
                names = _names(name.strip() for name in labels.get(key, b"").split(b",", _MAX_ADAPTERS))
                active.update(names[: _MAX_ADAPTERS - len(active)])
            if max_lora := _whole(labels.get(b"max_lora"), most=_MAX_SLOTS):
                slots.append(max_lora)
        return (max(slots) if slots else None), frozenset(active)

    def loaded_adapters(self) -> frozenset[str] | None:
        """Return adapters in GPU slots of all engines. None: the page does not say. If the page has the count
        of adapters, the answer is known even while no adapter is loaded.
        """
        series = self._by_field.get("lora_loaded", [])
        if not series and "lora_loaded_count" not in self._by_field:
            return None
        found = (_labels(sample.labels) for sample in series[:_MAX_ADAPTERS] if sample.value > 0)
        return frozenset(
            _names(each.get(b"adapter_name", b"") for each in found if each.get(b"level") == b"gpu")
        )

    def models(self) -> frozenset[str]:
        """Return the models that the page names. vLLM writes the first name that it serves a model by."""
        found = self._by_field.get("running", ())[:_MAX_LABELLED]
        return frozenset(_names(_labels(sample.labels).get(b"model_name", b"") for sample in found))

    def asleep(self) -> bool:
        """Return whether an engine says that it is not awake. An unreadable value says nothing."""
        return 0 in self._of_engines("awake")

    def _of_engines(self, field: str) -> list[float]:
        """Return one value for each engine and model. SGLang's tensor-parallel ranks repeat the gauge of
        their group, so the largest value counts.
        """
        series = self._by_field.get(field, ())
        if len(series) < 2:
            return [sample.value for sample in series]
        engines: dict[tuple[bytes, bytes], list[float]] = {}
        for sample in series:
            labels = _labels(sample.labels)
            key = _rank(labels), labels.get(b"model_name", b"")
            engines.setdefault(key, []).append(sample.value)
        # A sum with a NaN is NaN, which max() could miss.
        return [max(values) if math.isfinite(sum(values)) else math.nan for values in engines.values()]


def _series(samples: _Samples, name: str) -> Sequence[_Sample]:
    """Return the samples of `name`, or of `name{label=value}`."""
    family, _, condition = name.partition("{")
    found = samples.get(family.encode(), ())
    if not condition:
        return found
    label, _, value = condition.rstrip("}").encode().partition(b"=")
    return [sample for sample in found[:_MAX_LABELLED] if _labels(sample.labels).get(label) == value]


def _collect(page: bytes | bytearray) -> _Samples:
    """Return samples of known names, by name. Raises MetricsError if the page shows no sign of a model
    server.
    """
    page = b"\n" + page[: page.rfind(b"\n") + 1]  # a page that was cut off may end in the middle of a number
    lines = _bounded(page.count(_TYPE))
    samples: _Samples = {}
    known = False
    for start, end in _families(page):
        known = True
        lines = _bounded(lines + page.count(b"\n", start, end))
        _read_lines(page[start:end].split(b"\n"), samples)
    if not samples:
        for number, line in enumerate(_namespaced_lines(page), lines + 1):
            known = True
            _bounded(number)
            _read_lines((line,), samples)
    if not known:
        raise MetricsError(
            "the page has no metric of a known model server; if the metrics are at another address, set "
            "`metrics` of the endpoint"
        )
    if b"vllm:num_requests_running" not in samples and (b"\nvllm:" in page or _TYPE + b"vllm:" in page):
        # vLLM writes this gauge from its first second, so its absence means a page cut short,
        # not an idle server.
        raise MetricsError("this is a page of vLLM, but vllm:num_requests_running is missing")
    return samples


def _bounded(lines: int) -> int:
    if lines > _MAX_LINES:
        raise MetricsError(f"the page has more than {_MAX_LINES} lines of metrics")
    return lines


def _unread_bytes(page: bytes | bytearray) -> int:
    """Return the number of bytes of whole lines at the start of the page that have no known namespace, so
    that no number in them is read.
    """
    end = min(_HEAD_BYTES, len(page))
    for namespace in NAMESPACES:
        at = page.find(namespace, 0, end)
        end = at if at >= 0 else end
    return page.rfind(b"\n", 0, end) + 1


def _families(page: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the lines under the `# TYPE` of each known family."""
    at = page.find(_TYPE)
    while at >= 0:
        name_at = at + len(_TYPE)
        line_end = page.find(b"\n", name_at)
        at = page.find(_TYPE, line_end)
        if page[name_at:line_end].partition(b" ")[0] in FAMILIES:
            yield line_end + 1, at if at >= 0 else len(page)


def _namespaced_lines(page: bytes) -> Iterator[bytes]:
    """Yield lines that begin with a known namespace, for pages without `# TYPE`."""
    for namespace in NAMESPACES:
        at = page.find(b"\n" + namespace)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            yield page[at + 1 : end]
            at = page.find(b"\n" + namespace, end)


def _read_lines(lines: Iterable[bytes], samples: _Samples) -> None:
    for line in lines:
        # Most lines are histogram buckets: their name alone excludes them, before the slower match.
        name = line.partition(b"{")[0].partition(b" ")[0]
        if name in KNOWN and len(line) <= _MAX_LINE_BYTES:
            match = _SAMPLE.match(line, len(name))
            if match is not None:
                samples.setdefault(name, []).append(_Sample(match[1] or b"", _number(match[2])))


def _number(text: bytes) -> float:
    """Return a finite number from 0 to 1e15, else NaN. No metric read here can be negative or infinite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 <= value <= _MAX_VALUE else math.nan


def _whole(text: bytes | None, *, most: int = 10**_MAX_DIGITS) -> int | None:
    """Return a whole number. None: it is not whole, or over `most`."""
    if not text or not text.isdigit() or len(text) > _MAX_DIGITS:
        return None
    number = int(text)
    return number if number <= most else None


def _rank(labels: dict[bytes, bytes]) -> bytes:
    """Return the engine of a data parallel server that a series belongs to. vLLM and SGLang name it
    differently, and a page of Ray Serve has those of all workers.
    """
    return labels.get(b"WorkerId", b"") + (labels.get(b"engine") or labels.get(b"dp_rank") or b"")


def _names(written: Iterable[bytes]) -> list[str]:
    """Return the names that are neither empty nor too long."""
    return [name.decode("utf-8", "replace") for name in written if 0 < len(name) <= _MAX_NAME_BYTES]


def _labels(text: bytes) -> dict[bytes, bytes]:
    return {name: _unescaped(value) if b"\\" in value else value for name, value in _LABEL.findall(text)}


def _unescaped(value: bytes) -> bytes:
    return re.sub(rb"\\(.)", lambda found: b"\n" if found[1] == b"n" else found[1], value)

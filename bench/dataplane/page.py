"""Writes the page `docs/bench-dataplane.md`: the tables of one run, with the text that explains them."""

from __future__ import annotations

import textwrap
from typing import Final

_COLUMNS: Final = 110
_BEFORE: Final = """\
# What a request costs on its way through the gateway

This page says how much CPU a request takes in the picker and in Envoy, and how much time the way through them
adds. Each way is compared with a bare gRPC server, the floor.

Written by `make bench-dataplane ARGS="--page docs/bench-dataplane.md"`. Machine: {machine}

## How it is measured

- **One run, all ways.** The bench starts a real Envoy with the bootstrap of `epp envoy-config` and one
  listener for each way through it; `epp serve`; model servers that answer with fixed bytes; and one client
  with raw HTTP/1.1 on kept connections. Everything is on 127.0.0.1.
- **Turns.** In each round every way serves the same load for half a second, in a new random order. Tables
  show medians over the rounds. A ratio is taken within its round. The number after ± is half the distance
  between the quartiles.
- **CPU** is the CPU time of a process with all its threads. The kernel's clock of that process counts it:
  utime plus stime, but not in ticks of 10 ms. The CPU that the process uses without any request (scrapes,
  health checks) is measured first, shown, and subtracted.
- **The floor** is a bare grpc.aio server on the same event loop: it answers the same messages with constants,
  undecoded, on streams that it holds until the HTTP request ends, as our picker does. It runs on the defaults
  of gRPC and of the allocator.
- **The floor with our settings** uses the settings of `epp/serve/process.py` instead: gRPC's older listener,
  which passes no message from thread to thread, and an allocator that keeps freed memory. The difference
  between the two floors is what the settings alone are worth. The difference between this floor and our
  picker is what the picker's own code costs.
- **Load**: 4 requests are in flight for answers of 1 chunk, 16 for 100 chunks and 32 for 1,000, with a chunk
  each millisecond. Full duplex always has 4, because it could not keep up with more. The requests are chats
  in JSON, with some escapes and letters beyond ASCII in the text.
- **TTFT** is the time to the first byte of the answer's body. In the tables of CPU, the machine is kept busy
  on purpose, so TTFT is longer there. *One request at a time* shows what the way itself adds.
- Sampling is off in all rows except those that say so, since one sampled answer in a turn would change the
  figure. A separate table shows its cost.
- **1,000 endpoints** are 1,000 addresses of 127/8 on one port of one process. In their table only our picker
  and Envoy know all of them, since the scrapes of seven pickers would take more CPU than the machine has. The
  same picker with 4 endpoints runs beside it. Scrapes are as frequent without requests as with them, once a
  second for each endpoint. They cost more or less CPU on a busy machine than on a quiet one, so in this table
  the CPU without requests is measured in the turns in which the other of the two pickers serves. Each turn
  here lasts until the picker has also done the work that it puts off, such as its account of misses.
- *messages* is the number of messages that Envoy sent to the picker for each request. On a slow machine Envoy
  reads several chunks at once, so in full duplex there can be fewer messages than chunks.

## The run

"""


_AFTER: Final = """
## Where the picker's time goes

- **Python with cold caches.** Replayed alone (`python -m bench.bench_path`), a request of 1 KB takes the
  picker's code 0.12 ms. Between Envoy and a client, which use the processor's caches in turn, the same code
  takes more.
- **The parts of a request of 1 KB**: about 680 calls, none of which takes more than 4 % of the
  time. A profile of the whole way without sockets has these shares: the choice 16 %, booking it and recording
  the prompt 10, frames, windows and writes 21, messages to events and back 9, the end and the answer's
  headers 12, streams and request headers 5, the account of misses 9, the lateness of bytes 4, parsing 2,
  metrics 3; the rest lies between these parts.
- **No Python object is made** for whole frames, for headers that came before, and for pieces of a full duplex
  answer. This reduced the instructions of a request of 1 KB with all of HTTP/2, in one process without
  sockets (`bench/bench_streams.py` under valgrind), from 1.12 to 0.98 million; with 100 chunks in full duplex
  from 10.8 to 7.1 million.
- **A chunk in full duplex**: one call of C turns the pieces in a frame into their answers. No event is made,
  and neither the reader of frames nor the handler of the call sees them. On the picker's socket alone (two
  connections, a chunk each quarter of a millisecond, a busy machine, turns of each side in alternation) a
  chunk took 36 µs of CPU before this change and takes 24 now. A bare `asyncio.Protocol` on uvloop that only
  sends back what it read takes 9. The rest is about fourteen Python functions, at about 1 µs each with cold
  caches.
- **One request at a time**: Envoy alone adds 0.23 ms, and the picker's three round trips add the rest. On the
  picker's socket alone (a request of 1 KB each millisecond, a busy machine), 125 to 155 µs pass from the
  message with the headers to its answer, 245 to 270 for the body, and 75 to 80 for the answer's headers. A
  bare protocol that sends back what it read takes 24 to 32 for each round trip. So of about 470 µs, 90 are
  waking up and sockets, and 380 are our Python with cold caches. Each answer is one write, in the turn of the
  loop that read its message.
- **At 400 KB** one pass in C reads and weighs a body and writes its canonical prompt (110 µs), one call
  hashes it (30), the account of misses follows a sample of its 450 chunks (20), and the body is copied three
  times on the way (10 to 25 each). Each part was measured alone. Envoy sends such a body in 25 frames of 16
  KB. Of all this, the floor only makes the copies. The ordinary decoder reads a body with tools, parts or
  names, which takes 0.2 ms more.
- **10 million streams** went through the transport with constant answers, a tenth of them aborted (`python -m
  bench.bench_streams --thousands 10000 --bare`). Each took 44 to 47 µs of CPU beside other work. The C heap
  was 10.32 MiB and resident memory 48.9 MiB at the first million and at the last.
- **10 million streams** went through the whole picker, a tenth of them aborted (`python -m
  bench.bench_streams --thousands 10000 --kb 0.4`). Each took 262 to 364 µs of CPU beside other work. The C
  heap was 15.66 MiB at every million, and resident memory 70.0 MiB at the first and 70.8 at the last. No
  stream was left open.
- **Half an hour of mixed load** with aborts ran beside the whole test suite (`make soak ARGS="--minutes
  30"`). Pickers were killed and Redis was flushed meanwhile. None of 177,000 requests failed. Workers took 79
  MiB in the middle of their lives and at the end. No booking was left, and no memory had grown.
- **10 million mutated frames** (`python -m tests.property.http2.mutated_frames --frames 10000000`, about six
  minutes of CPU) raised no exception and left no call, no booking and no unfinished message. The process took
  49 MiB at most.
- **At 40 KB** the floor costs hardly more than at 1 KB, while our picker reads, hashes and records the
  prompt.
- **With 100 endpoints** every pick looks at each of them and puts the best ten in order. Measured alone, in
  turns, on a busy machine, a pick takes 64 µs with 4 endpoints, 83 with 100 and 97 with 1,000 (the fastest
  tenth of the picks; an earlier version took 68, 100 and 117). Of the 19 µs between 4 and 100, finding ten of
  many equals takes 6, and the record of the ten that are shown takes 4. Of the 14 µs between 100 and 1,000,
  sums over the columns take 8. The work after the answer takes 23 µs with any number of endpoints (an earlier
  version took 46 with 1,000).
- **With 1,000 endpoints** the extra cost over 4 endpoints is the picker's own work, not that of scrapes: with
  a scrape a minute instead of one a second the ratio was the same (1.25 and 1.34 with a scrape a minute, 1.21
  to 1.38 before, on a busy machine). `make bench-dataplane ARGS=--thousand` compares only these two. On a
  quiet machine, 30 rounds gave 1.32 and 60 rounds 1.25, where single turns differ by a tenth. Most of the
  extra cost is the choice, which reads longer columns with cold caches.
  In such a fleet each fallback list is new, and protobuf took 11 µs more to write the list. Answers are now
  made from earlier answers, which takes 2 µs.
- **Load.** The line about the machine has its load when the run began. If it is far above the number of
  CPUs, other programs ran beside the bench. TTFT then says little, and ratios differ from run to run by a
  fifth and more. On a virtual machine the line does not show how busy the host is.
- **An earlier run on a quieter host** (November 2026, the picker's code a little older) cost 0.57, 0.60 and
  0.61 times the floor at 1 KB with 1, 100 and 1,000 chunks, 0.91 times at 40 KB and 1.12 times at 400 KB.
  1,000 endpoints cost 1.36 times as much as 4 (target 1.3: missed), and 100 endpoints at 400 KB 1.14 times
  the floor (target 1.0: missed). A chunk in full duplex took 32 us, and a single request got 1.26 ms more.
  Tracing 1 % of the picks cost 1.21 times the CPU without tracing, and tracing every pick 1.73 times.
"""


def page(*, machine: str, tables: str) -> str:
    text = _BEFORE.format(machine=machine) + tables + _AFTER
    return "\n".join(_wrapped(line) for line in text.split("\n"))


def _wrapped(line: str) -> str:
    """Return a long line, such as a target of many words, as two lines. A row of a table is never wrapped."""
    if len(line) <= _COLUMNS or line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )

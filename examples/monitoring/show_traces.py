"""Shows what SGLang traces, in place of a collector: an OTLP/HTTP receiver that prints every trace as a tree.

    python examples/monitoring/show_traces.py --port 4318

Start both servers with `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf` in their environment and with
`--enable-trace --otlp-traces-endpoint http://127.0.0.1:4318/v1/traces`; they need the extra `tracing`, as this does.
Prints a trace once nothing more has come for it for `--quiet` seconds. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PREFIX = "spectrumkv."


@dataclass
class ReceivedSpan:
    """One span; times in seconds since 1970, ids as hexadecimal digits, ``parent`` empty for a root.

    ``error`` is the status of one that failed, else empty.
    """

    trace: str
    identity: str
    parent: str
    name: str
    start: float
    end: float
    attributes: dict[str, object] = field(default_factory=dict)
    error: str = ""


class Receiver:
    """Takes spans as OTLP over HTTP on ``port`` of 127.0.0.1 (0: a free one) and keeps them by trace."""

    def __init__(self, port: int = 0) -> None:
        self.traces: dict[str, list[ReceivedSpan]] = {}
        self.last_heard: dict[str, float] = {}
        self.lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(spans_of(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Value of ``--otlp-traces-endpoint``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def take(self, spans: Iterable[ReceivedSpan]) -> None:
        """Keep spans that came."""
        with self.lock:
            for span in spans:
                self.traces.setdefault(span.trace, []).append(span)
                self.last_heard[span.trace] = time.monotonic()

    def take_out(self, quiet_seconds: float) -> list[list[ReceivedSpan]]:
        """Traces for which nothing has come for so long; they are forgotten."""
        now = time.monotonic()
        with self.lock:
            ended = [trace for trace, heard in self.last_heard.items() if now - heard >= quiet_seconds]
            for trace in ended:
                del self.last_heard[trace]
            return [self.traces.pop(trace) for trace in ended]

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def spans_of(body: bytes) -> Iterator[ReceivedSpan]:
    """The spans of one request."""
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes: dict[str, object] = {}
                for attribute in span.attributes:
                    kind = attribute.value.WhichOneof("value")
                    attributes[attribute.key] = getattr(attribute.value, kind) if kind else None
                yield ReceivedSpan(
                    trace=span.trace_id.hex(),
                    identity=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes=attributes,
                    error=(span.status.message or "failed") if span.status.code == Status.STATUS_CODE_ERROR else "",
                )


def tree_of(spans: list[ReceivedSpan]) -> Iterator[str]:
    """Lines of a trace: milliseconds from its start, its length, its name, and what SpectrumKV says of it."""
    known = {span.identity for span in spans}
    began = min(span.start for span in spans)

    def lines(parent: str | None, depth: int) -> Iterator[str]:
        children = [one for one in spans if (one.parent == parent if parent else one.parent not in known)]
        for span in sorted(children, key=lambda one: one.start):
            ours = [
                f"{key.partition('.')[2]}={value}" for key, value in span.attributes.items() if "spectrumkv." in key
            ]
            times = f"{(span.start - began) * 1e3:9.1f} {(span.end - span.start) * 1e3:9.1f} ms"
            ours += [f"ERROR {span.error}"] if span.error else []
            yield f"{times}  {'  ' * depth}{span.name} {' '.join(ours)}".rstrip()
            yield from lines(span.identity, depth + 1)

    yield from lines(None, 0)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, default=4318, help="default: %(default)s")
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds without a further span (default: %(default)s)"
    )
    options = parser.parse_args()
    receiver = Receiver(options.port)
    print(f"--otlp-traces-endpoint {receiver.endpoint}", flush=True)
    try:
        while True:
            time.sleep(0.5)
            for spans in receiver.take_out(options.quiet):
                print(f"trace {spans[0].trace}, {len(spans)} spans:", *tree_of(spans), sep="\n", flush=True)
    except KeyboardInterrupt:
        receiver.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())

"""The monitoring example against a real pair: a real Prometheus scrapes it, and every query and rule is asked.

    python examples/monitoring/against_a_pair.py --prefill-url http://127.0.0.1:30000 --decode-url http://127.0.0.1:31000

Needs the programs of Debian's package prometheus, and a pair that has served something. Prints what each query of the
dashboard found; --picture FILE draws the dashboard as well (draw_dashboard.py). Ends with 1 when a query failed,
Prometheus could not scrape a server, or none of our names got there.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from draw_dashboard import Drawing, prometheus

HERE = Path(__file__).resolve().parent
DASHBOARD = HERE / "grafana" / "dashboards" / "spectrumkv.json"
SCRAPE_SECONDS = 5
READY_SECONDS = 60
WINDOW = "2m"
PICTURE_WINDOW = "20s"
ASKED_AT_ONCE = "spectrumkv:config_info"
"""There from the start of every server: without it no name of ours reached Prometheus."""


def dashboard_queries(model: str = ".*", window: str = WINDOW) -> list[tuple[str, str]]:
    """(panel's title, query) of the dashboard, its variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", window).replace("$model", model))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def ask(base: str, path: str, **parameters: str) -> Any:
    """``data`` of an answer of Prometheus' HTTP API."""
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(f"{base}/api/v1/{path}{query}", timeout=30) as answer:
        return json.load(answer)["data"]


def configuration(folder: Path, addresses: list[str]) -> Path:
    """prometheus.yaml with the pair's addresses, the rules beside it."""
    text = (HERE / "prometheus.yaml").read_text(encoding="utf-8").replace("10s", f"{SCRAPE_SECONDS}s")
    for placeholder, address in zip(("127.0.0.1:30000", "127.0.0.1:31000"), addresses, strict=True):
        text = text.replace(placeholder, address)
    (folder / "alerts.yaml").write_text((HERE / "alerts.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    path = folder / "prometheus.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefill-url", required=True)
    parser.add_argument("--decode-url", required=True)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the dashboard into this .png")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to scrape before asking")
    options = parser.parse_args()
    addresses = [urllib.parse.urlsplit(url).netloc for url in (options.prefill_url, options.decode_url)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "prometheus.log").open("w+") as log:
        command = ["prometheus", f"--config.file={configuration(Path(folder), addresses)}",
                   f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            failed = check(base, server, options.seconds)
            if options.picture is not None:
                dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
                drawing = Drawing(prometheus(base), now=time.time(), seconds=options.seconds, window=PICTURE_WINDOW)
                filled = drawing.draw(dashboard, options.picture)
                print(f"{options.picture}: {filled} of {len(dashboard['panels'])} panels have data")
            return failed
        except (OSError, TimeoutError) as error:
            log.seek(0)
            print(f"Prometheus does not answer: {error}\n{log.read()[-2000:]}", file=sys.stderr)
            return 1
        finally:
            server.terminate()
            server.wait(30)


def check(base: str, server: subprocess.Popen[bytes], seconds: float) -> int:
    """Scrape for so long, then ask everything; 1 if something failed."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            targets = ask(base, "targets")["activeTargets"]
        except (urllib.error.URLError, ConnectionError):
            targets = []
        if targets and all(target["health"] != "unknown" for target in targets):
            break
        if server.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"not ready within {READY_SECONDS} s")
        time.sleep(0.2)
    time.sleep(seconds)
    failed = 0
    for target in ask(base, "targets")["activeTargets"]:
        print(f"{target['scrapeUrl']}: {target['health']} {target['lastError']}")
        failed += target["health"] != "up"
    for title, query in dashboard_queries():
        try:
            found = ask(base, "query", query=query)["result"]
        except urllib.error.HTTPError as error:
            print(f"{title}: FAILED {error.read().decode()}")
            failed += 1
            continue
        if not found and ASKED_AT_ONCE in query:
            print(f"{title}: FAILED, no series of {ASKED_AT_ONCE}")
            failed += 1
        first = f", first {found[0]['value'][1]}" if found else ""
        print(f"{title}: {len(found)} series{first}: {query}")
    for group in ask(base, "rules")["groups"]:
        for rule in group["rules"]:
            print(f"alert {rule['name']}: {rule['health']}, {rule['state']} {rule.get('lastError', '')}")
            failed += rule["health"] != "ok"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

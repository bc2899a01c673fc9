"""The demo: a real prefill/decode pair answers beside a plain server, and every byte is accounted for.

    python -m spectrumkv_sglang.launch.demo

Probes the model; then starts a plain server, one decode server, a prefill server for each profile shown and a router in
front of each, all on this machine's loopback, decode and the tiered prefill server with `spectrumkv launch` from the
config that the probe wrote; sends the same prompts to all; shows the answers and, from the prefill servers' transfer
logs, what crossed the wire. As root on Linux the servers live in a network namespace of their own, so that the bytes
counted on its loopback interface are theirs alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import Completion, flush_caches, generate, generate_on_pair
from spectrumkv_sglang.launch.demo_probe import DemoProbe, run_probe
from spectrumkv_sglang.launch.demo_report import RequestReport, print_report
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.netns import (
    LOOPBACK,
    NetworkNamespace,
    interface_bytes,
    namespaces_available,
)
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.prompts import DEMO_PROMPTS, Prompt
from spectrumkv_sglang.launch.servers import (
    DEFAULT_LOG_DIR,
    Device,
    Fleet,
    Role,
    Router,
    Server,
    ServerSpec,
    SGLangServer,
    default_backend,
    detect_device,
)
from spectrumkv_sglang.launch.sglang_versions import DEFAULT_BUILD_DIR, installed_version
from spectrumkv_sglang.launch.transfer_log_reader import TransferLogReader, request_transfer

_LOG_DIR = DEFAULT_LOG_DIR / "demo"
_WIDTH_OF_A_FILE = 110


@dataclass(frozen=True)
class ShownProfile:
    """A profile of the demo with its budget b (wire bytes / native bytes); ``probed``: the probe has judged it."""

    name: str
    budget: float
    probed: bool = False


PROFILES = (
    ShownProfile("native-packed", 1.0),
    ShownProfile("int8", 0.55),
    ShownProfile("balanced", 0.3, probed=True),
)


@dataclass(frozen=True)
class ProfilePair:
    """One profile's prefill server with its router (None: requests go to the pair directly) and its transfer log."""

    profile: str
    budget: float
    prefill: SGLangServer
    router: Router | None
    log: TransferLogReader | None


class Demo:
    """Servers and measurements of one run.

    Args:
        console: where progress is shown.
        fleet: takes charge of the servers.
        namespace: the servers' network namespace; None for the machine's own.
        model: the model's directory.
        device: CPU or GPU.
        backend: value of ``--disaggregation-transfer-backend``. With SGLang's own ``mooncake`` or ``mooncake_tcp``
            there is one prefill server and no transfer log, so its figures stay empty: a control.
        max_new_tokens: tokens generated for each prompt.
        launch_config: what the probe wrote; None with SGLang's own backends.
        direct: send requests to the two servers as a router would, instead of starting routers.
    """

    def __init__(
        self,
        console: Console,
        fleet: Fleet,
        namespace: NetworkNamespace | None,
        *,
        model: Path,
        device: Device,
        backend: str,
        max_new_tokens: int,
        launch_config: Path | None = None,
        direct: bool = False,
    ) -> None:
        self.direct = direct
        self.launch_config = launch_config
        self.console = console
        self.fleet = fleet
        self.namespace = namespace
        self.model = model
        self.device = device
        self.backend = backend
        self.max_new_tokens = max_new_tokens
        self._announced: set[Server] = set()

    def run(self) -> list[RequestReport]:
        """Send every prompt to the plain server and through every profile; return one report each, prompt by prompt.

        At most three servers run at a time, which two cores start about as fast as all five at once and in half the
        memory. Nothing starts while something is measured.
        """
        plain = self._start(Role.PLAIN, "plain")
        decode = self._start(Role.DECODE, "decode", launch_config=self.launch_config)
        first, *others = self._shown()
        pairs = [self._start_pair(first, decode)]
        self._wait_ready()
        expected = {prompt.name: self._ask_plain(plain, prompt) for prompt in DEMO_PROMPTS}
        self.fleet.stop([plain])
        reports = self._ask_pairs(pairs, decode, expected)
        if others:
            self.fleet.stop([server for server in (pairs[0].router, pairs[0].prefill) if server is not None])
            pairs = [self._start_pair(shown, decode) for shown in others]
            self._wait_ready()
            reports += self._ask_pairs(pairs, decode, expected)
        order = [prompt.name for prompt in DEMO_PROMPTS]
        return sorted(reports, key=lambda report: order.index(report.prompt))

    def _shown(self) -> tuple[ShownProfile, ...]:
        return PROFILES if self.backend.startswith("spectrumkv") else (ShownProfile(self.backend, 1.0),)

    def _start(
        self, role: Role, name: str, env: dict[str, str] | None = None, launch_config: Path | None = None
    ) -> SGLangServer:
        spec = ServerSpec(
            role=role,
            model=self.model,
            backend=self.backend,
            device=self.device,
            env=env or {},
            namespace=self.namespace,
            launch_config=launch_config,
        )
        return self.fleet.start(SGLangServer(spec, name, log_dir=_LOG_DIR))

    def _start_pair(self, shown: ShownProfile, decode: SGLangServer) -> ProfilePair:
        log = None
        env: dict[str, str] = {}
        if self.backend.startswith("spectrumkv"):
            path = (_LOG_DIR / f"transfers-{shown.name}.jsonl").resolve()
            log = TransferLogReader(path)
            env = {
                "SPECTRUMKV_PROFILE": shown.name,
                "SPECTRUMKV_BUDGET": str(shown.budget),
                "SPECTRUMKV_TRANSFER_LOG": str(path),
            }
        launch_config = self.launch_config if shown.probed else None
        prefill = self._start(Role.PREFILL, f"prefill-{shown.name}", env, launch_config)
        if self.direct:
            return ProfilePair(shown.name, shown.budget, prefill, None, log)
        router = Router(prefill, decode, f"router-{shown.name}", log_dir=_LOG_DIR)
        return ProfilePair(shown.name, shown.budget, prefill, self.fleet.start_router(router), log)

    def _wait_ready(self) -> None:
        """Wait until everything answers, saying so server by server."""

        def ready(server: Server, seconds: float) -> None:
            if server not in self._announced:
                self._announced.add(server)
                self.console.print(f"  [green]{server.name}[/] ready after {seconds:.0f} s")

        def waiting(servers: Sequence[Server], seconds: float) -> None:
            self.console.print(f"  waiting for {', '.join(server.name for server in servers)}, {seconds:.0f} s so far")

        self.console.print(f"starting servers, a minute or two on two cores; their logs are in {_LOG_DIR}")
        with self.console.status("waiting for the servers"):
            self.fleet.wait_ready(on_ready=ready, on_waiting=waiting)

    def _ask_plain(self, plain: SGLangServer, prompt: Prompt) -> Completion:
        with self.console.status(f"{prompt.name}: plain server"):
            flush_caches([plain])
            return generate(plain, prompt.text, max_new_tokens=self.max_new_tokens)

    def _ask_pairs(
        self, pairs: list[ProfilePair], decode: SGLangServer, expected: dict[str, Completion]
    ) -> list[RequestReport]:
        reports = []
        for pair in pairs:
            for prompt in DEMO_PROMPTS:
                with self.console.status(f"{prompt.name}: {pair.profile}"):
                    reports.append(self._ask(pair, decode, prompt, expected[prompt.name]))
            self.console.print(f"  [green]{pair.profile}[/] has answered {len(DEMO_PROMPTS)} prompts")
        return reports

    def _ask(self, pair: ProfilePair, decode: SGLangServer, prompt: Prompt, plain: Completion) -> RequestReport:
        # A cached prefix alone changes later tokens, and would shrink the transfer.
        flush_caches([pair.prefill, decode])
        if pair.log is not None:
            pair.log.skip()
        before = self._loopback_bytes()
        if pair.router is None:
            answer = generate_on_pair(pair.prefill, decode, prompt.text, max_new_tokens=self.max_new_tokens)
        else:
            answer = generate(pair.router, prompt.text, max_new_tokens=self.max_new_tokens)
        crossed = self._loopback_bytes() - before
        transfer = request_transfer(pair.log.next_request()) if pair.log is not None else None
        return RequestReport(prompt.name, pair.profile, pair.budget, plain, answer, crossed, transfer)

    def _loopback_bytes(self) -> int:
        counters = self.namespace.interface_bytes() if self.namespace is not None else interface_bytes(LOOPBACK)
        return counters.sent


def report_json(reports: list[RequestReport], device: Device, probe: DemoProbe | None) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "probe": None if probe is None else json.loads(probe.result.read_text(encoding="utf-8")),
        "requests": [report.as_json() for report in reports],
        "sglang": installed_version(),
        "device": device.value,
    }


@contextmanager
def _servers_namespace(console: Console) -> Iterator[NetworkNamespace | None]:
    if namespaces_available():
        with NetworkNamespace("demo") as namespace:
            yield namespace
        return
    console.print(
        "[yellow]note:[/] without root there is no network namespace: interface bytes are counted on the machine's "
        "loopback, where other programs' traffic counts too"
    )
    yield None


def run_demo(
    console: Console,
    *,
    backend: str,
    max_new_tokens: int,
    json_path: Path,
    model: Path | None = None,
    direct: bool = False,
) -> None:
    """Run the whole demo, print its tables to ``console`` and write ``json_path``.

    Raises:
        SpectrumKVError: anything expected that went wrong; the servers are stopped by then.
    """
    device = detect_device()
    console.print(f"SGLang {installed_version()} on {device.value}, backend {backend}")
    model = model or fetch_model(console=console)
    shutil.rmtree(_LOG_DIR, ignore_errors=True)
    probe = None
    if backend.startswith("spectrumkv"):
        probe = run_probe(console, model=model, device=device, backend=backend, folder=json_path.parent)
    with ExitStack() as stack:
        namespace = stack.enter_context(_servers_namespace(console))
        fleet = stack.enter_context(Fleet())
        demo = Demo(
            console,
            fleet,
            namespace,
            model=model,
            device=device,
            backend=backend,
            max_new_tokens=max_new_tokens,
            launch_config=probe.launch_config if probe is not None else None,
            direct=direct,
        )
        reports = demo.run()
    print_report(console, reports)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report_json(reports, device, probe), indent=2) + "\n", encoding="utf-8")
    files = [json_path, *((probe.launch_config, probe.result, probe.plot) if probe is not None else ())]
    console.print(f"written: {', '.join(map(str, files))}")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m spectrumkv_sglang.launch.demo", description="Run a real prefill/decode pair on this machine."
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=DEFAULT_BUILD_DIR / "demo.json",
        metavar="FILE",
        help="where the figures go (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        default=default_backend(),
        choices=["spectrumkv", "spectrumkv_tcp", "mooncake", "mooncake_tcp"],
        help="transfer backend; SGLang's own ones are for comparison (default here: %(default)s)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--model-path", type=Path, metavar="DIR", help="another model's directory (default: fetch the small one)"
    )
    parser.add_argument("--direct", action="store_true", help="send requests to the pair itself, start no router")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    return _exit_status(
        lambda: run_demo(
            console,
            backend=options.backend,
            max_new_tokens=options.max_new_tokens,
            json_path=options.json,
            model=options.model_path,
            direct=options.direct,
        )
    )


def _exit_status(action: Callable[[], None]) -> int:
    """Run the demo; turn what may go wrong into a message and an exit status."""
    try:
        with stopping_on_signals():
            action()
    except SpectrumKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: all servers are down", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

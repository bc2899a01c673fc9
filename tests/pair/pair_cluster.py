"""Real SGLang servers for end-to-end tests, started on first use and shared by the whole test session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrumkv_sglang.launch.client import Completion, flush_caches, generate, generate_on_pair
from spectrumkv_sglang.launch.netns import NetworkNamespace, namespaces_available
from spectrumkv_sglang.launch.servers import Fleet, Role, Router, ServerSpec, SGLangServer
from spectrumkv_sglang.launch.transfer_log_reader import TransferLogReader

DEFAULT_BACKEND = "spectrumkv_tcp"
METRICS = ("--enable-metrics",)
# A server holds 2.3 GB. The one that was used longest ago makes room for a new one: tests stop those that no later one
# uses, in an order in which each is started once.
MAX_SERVERS = 5


@dataclass(frozen=True)
class _Wanted:
    """What makes two requests for a server the same one."""

    role: Role
    backend: str
    extra_args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    sglang: str | None


class PairCluster:
    """Starts plain, prefill and decode servers and keeps them for the next test that asks for the same.

    ``plain``, ``prefill`` and ``decode`` return at once; a server is waited for when it is first used, so a test that
    asks for all its servers before it generates starts them side by side.

    Args:
        model: the model's directory.
        log_dir: where the servers write their logs.
        build_dir: where other SGLang releases are unpacked.
    """

    def __init__(self, *, model: Path, log_dir: Path, build_dir: Path) -> None:
        self.model = model
        self.log_dir = log_dir
        self.build_dir = build_dir
        self._servers: OrderedDict[_Wanted, SGLangServer] = OrderedDict()
        self._routers: dict[tuple[str, str], Router] = {}
        self._logs: dict[str, TransferLogReader] = {}
        self._ready: set[str] = set()
        self._started = 0
        with ExitStack() as stack:
            # Callbacks run in reverse order: the servers go before their namespace.
            self.namespace = stack.enter_context(NetworkNamespace("tests")) if namespaces_available() else None
            self._fleet = stack.enter_context(Fleet())
            self._resources = stack.pop_all()

    def plain(
        self, *, extra_args: Sequence[str] = (), env: Mapping[str, str] | None = None, sglang: str | None = None
    ) -> SGLangServer:
        """Return a server that answers alone."""
        return self._server(Role.PLAIN, "", extra_args, env or {}, sglang)

    def prefill(
        self,
        *,
        profile: str | None = None,
        budget: float | None = None,
        backend: str = DEFAULT_BACKEND,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        sglang: str | None = None,
    ) -> SGLangServer:
        """Return a prefill server; ``profile`` and ``budget`` are the backend's defaults when None."""
        settings = dict(env or {})
        if profile is not None:
            settings["SPECTRUMKV_PROFILE"] = profile
        if budget is not None:
            settings["SPECTRUMKV_BUDGET"] = str(budget)
        return self._server(Role.PREFILL, backend, extra_args, settings, sglang)

    def decode(
        self,
        *,
        backend: str = DEFAULT_BACKEND,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        sglang: str | None = None,
    ) -> SGLangServer:
        """Return a decode server."""
        return self._server(Role.DECODE, backend, extra_args, env or {}, sglang)

    def router(self, prefill: SGLangServer, decode: SGLangServer) -> Router:
        """Return a router in front of the two servers, all three ready."""
        self.wait_ready(prefill, decode)
        router = self._routers.get((prefill.name, decode.name))
        if router is None or not router.alive:
            self._started += 1
            router = Router(prefill, decode, f"router-{self._started}", log_dir=self.log_dir)
            self._fleet.start_router(router)
            self._fleet.wait_ready([router])
            self._routers[(prefill.name, decode.name)] = router
        return router

    def generate(
        self,
        prefill: SGLangServer,
        decode: SGLangServer,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 32,
        flush: bool = True,
        bootstrap_room: int | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Generate greedily on the pair.

        Args:
            prefill: prefill server.
            decode: decode server.
            prompt: text, or token ids.
            max_new_tokens: upper bound of generated tokens.
            flush: empty both prefix caches first; a cached prefix alone changes later tokens.
            bootstrap_room: SGLang's room of the request; a random one by default.
            sampling: further SGLang sampling parameters.
        """
        self.wait_ready(prefill, decode)
        if flush:
            flush_caches([prefill, decode])
        return generate_on_pair(
            prefill,
            decode,
            prompt,
            max_new_tokens=max_new_tokens,
            bootstrap_room=bootstrap_room,
            sampling=sampling,
        )

    def generate_alone(
        self,
        plain: SGLangServer,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 32,
        flush: bool = True,
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Generate greedily on a plain server; arguments as in `generate`."""
        self.wait_ready(plain)
        if flush:
            flush_caches([plain])
        return generate(plain, prompt, max_new_tokens=max_new_tokens, sampling=sampling)

    def transfers(self, prefill: SGLangServer) -> TransferLogReader:
        """Return the reader of a prefill server's transfer log."""
        return self._logs[prefill.name]

    def loopback_bytes(self) -> int:
        """Return the bytes sent so far on the loopback interface of the servers' network namespace (root only)."""
        if self.namespace is None:
            raise RuntimeError("counting interface bytes needs a network namespace, which needs root and pyroute2")
        return self.namespace.interface_bytes().sent

    def wait_ready(self, *servers: SGLangServer) -> None:
        """Wait until the servers are healthy; costs nothing for one that was healthy before and is alive."""
        for server in servers:
            server.check_alive()
            for wanted, known in self._servers.items():
                if known is server:
                    self._servers.move_to_end(wanted)
                    break
        waiting = [server for server in servers if server.name not in self._ready]
        self._fleet.wait_ready(waiting)
        self._ready.update(server.name for server in waiting)

    def stop(self, server: SGLangServer) -> None:
        """Stop one server and the routers in front of it; the next request for the same starts a new one."""
        routers = [router for names, router in self._routers.items() if server.name in names]
        self._fleet.stop([server, *routers])
        self._routers = {names: router for names, router in self._routers.items() if server.name not in names}
        self._servers = OrderedDict((wanted, known) for wanted, known in self._servers.items() if known is not server)

    def close(self) -> None:
        """Stop everything."""
        self._resources.close()

    def _server(
        self, role: Role, backend: str, extra_args: Sequence[str], env: Mapping[str, str], sglang: str | None
    ) -> SGLangServer:
        wanted = _Wanted(role, backend, tuple(extra_args), tuple(sorted(env.items())), sglang)
        server = self._servers.get(wanted)
        if server is not None and not server.alive:
            self.stop(server)
            server = None
        if server is None:
            while len(self._servers) >= MAX_SERVERS:
                self.stop(next(iter(self._servers.values())))
            server = self._start(wanted)
            self._servers[wanted] = server
        self._servers.move_to_end(wanted)
        return server

    def _start(self, wanted: _Wanted) -> SGLangServer:
        self._started += 1
        name = f"{wanted.role.value}-{self._started}"
        env = dict(wanted.env)
        if wanted.role is Role.PREFILL:
            log = Path(env.setdefault("SPECTRUMKV_TRANSFER_LOG", str((self.log_dir / f"{name}.jsonl").resolve())))
            log.unlink(missing_ok=True)
            self._logs[name] = TransferLogReader(log)
        spec = ServerSpec(
            role=wanted.role,
            model=self.model,
            backend=wanted.backend,
            sglang=wanted.sglang,
            extra_args=wanted.extra_args,
            env=env,
            namespace=self.namespace,
            build_dir=self.build_dir,
        )
        return self._fleet.start(SGLangServer(spec, name, log_dir=self.log_dir))

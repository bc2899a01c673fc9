"""Load on a router, by SGLang's own ``sglang.bench_serving`` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.netns import NetworkNamespace

CLIENT = Path(__file__).with_name("serving_client.py")
_LOG_TAIL_CHARACTERS = 2000


class LoadError(SpectrumKVError):
    """``sglang.bench_serving`` did not run to its end."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Random prompts of one length that arrive at random times (Poisson), the same ones for the same seed.

    Attributes:
        request_rate: mean number of requests a second.
        prompts: number of requests.
        input_tokens: length of each prompt.
        output_tokens: length of each answer; the end of text is ignored.
        seed: of prompts and times.
        max_concurrency: requests under way at once at most; None for no limit.
    """

    request_rate: float
    prompts: int
    input_tokens: int
    output_tokens: int
    seed: int
    max_concurrency: int | None = None

    def arguments(self, url: str, tokenizer: Path, result: Path) -> list[str]:
        """Arguments of ``python -m sglang.bench_serving``, the same in SGLang 0.5.16 to 0.5.23.

        ``random-ids`` needs no file, and sent as ids a prompt has exactly the length asked for. The tool warms up with
        the first prompt, which would then lie in prefill's prefix cache, so that is left to the caller.
        """
        arguments = ["--backend", "sglang", "--base-url", url]
        arguments += ["--model", str(tokenizer), "--tokenizer", str(tokenizer)]
        arguments += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0"]
        arguments += ["--random-input-len", str(self.input_tokens), "--random-output-len", str(self.output_tokens)]
        arguments += ["--num-prompts", str(self.prompts), "--request-rate", str(self.request_rate)]
        arguments += ["--seed", str(self.seed), "--warmup-requests", "0", "--disable-tqdm"]
        arguments += ["--output-file", str(result), "--output-details"]
        if self.max_concurrency is not None:
            arguments += ["--max-concurrency", str(self.max_concurrency)]
        return arguments


class LoadGenerator:
    """A process that holds the imported tool and runs it when asked; a context manager that ends it.

    Args:
        environment: of the process.
        namespace: network namespace that it runs in; None for the program's own.
        log_dir: working directory, and folder of the logs.
    """

    def __init__(self, environment: dict[str, str], namespace: NetworkNamespace | None, log_dir: Path) -> None:
        self._environment = {**environment, "NO_PROXY": "*", "no_proxy": "*"}
        self._namespace = namespace
        self._log_dir = log_dir
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LoadGenerator:
        inside = self._namespace.entered() if self._namespace is not None else nullcontext()
        with (self._log_dir / "bench-serving-client.log").open("wb") as log, inside:
            self._process = subprocess.Popen(
                [sys.executable, str(CLIENT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                cwd=self._log_dir,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._process = None

    def run(self, load: Load, url: str, tokenizer: Path, name: str) -> Path:
        """Put ``load`` on the server or router at ``url`` and wait for its end.

        Args:
            name: of the result and the log in the log folder.

        Returns:
            The tool's result: one line of JSON.

        Raises:
            LoadError: the tool failed; says how its log ends.
        """
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            raise LoadError("the load generator is not running: use it in a `with` block")
        result, log = self._log_dir / f"{name}.jsonl", self._log_dir / f"{name}.log"
        result.unlink(missing_ok=True)  # the tool appends
        order = {"arguments": load.arguments(url, tokenizer, result), "log": str(log)}
        answer = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise LoadError(
                f"sglang.bench_serving ended by itself: {_tail(self._log_dir / 'bench-serving-client.log')}"
            )
        status = json.loads(answer)["status"]
        if status != 0 or not result.is_file():
            raise LoadError(f"sglang.bench_serving ended with status {status}; its log {log} ends with:\n{_tail(log)}")
        return result


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARACTERS:] if log.is_file() else "(no log)"

"""Run in a process of its own by test_plugin.py: SGLang's start-up up to its resolved arguments, one scenario a call.

    python plugin_scenarios.py SCENARIO MODEL_DIR

Prints one JSON object: what the process looks like afterwards, or the error that stopped it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

SERVER = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--dtype",
    "float32",
    "--disaggregation-mode",
    "prefill",
)


def start_up(model: str, *flags: str) -> object:
    """What ``sglang.launch_server`` does before it starts its children."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(["--model-path", model, *SERVER, *flags])
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


def patched() -> list[str]:
    """Every target in SGLang that a hook was put on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(HookRegistry._patched)


def state() -> dict[str, object]:
    """What a scenario leaves behind."""
    return {
        "patched": patched(),
        "active": os.environ.get("SPECTRUMKV_ACTIVE"),
        "config": os.environ.get("SPECTRUMKV_CONFIG"),
        "force_tcp": os.environ.get("MC_FORCE_TCP"),
        "tcp_slice": os.environ.get("MC_TCP_SLICE_SIZE"),
        "strict": os.environ.get("SPECTRUMKV_STRICT"),
        "mooncake_conn_imported": "sglang.srt.disaggregation.mooncake.conn" in sys.modules,
        "prometheus_imported": "prometheus_client" in sys.modules,
    }


def scheduler(scenario: str, answers: multiprocessing.Queue) -> None:
    """What a scheduler process does first; SGLang itself would only log a plugin's exception."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.plugins import load_plugins

    if scenario == "missing-in-scheduler":
        del MooncakeKVManager.transfer_worker
    try:
        load_plugins()
        answers.put(state())
    except SystemExit as error:
        answers.put({"error": type(error).__name__, "message": str(error)})


def main(scenario: str, model: str) -> dict[str, object]:
    """Run ``scenario``; see test_plugin.py for what each must show."""
    if scenario == "not-chosen":
        start_up(model, "--disaggregation-transfer-backend", "mooncake")
        return state()
    if scenario in ("spectrumkv", "spectrumkv_tcp"):
        from sglang.srt.arg_groups.overrides import resolving_view

        args = start_up(model, "--disaggregation-transfer-backend", scenario)
        return {**state(), "backend": resolving_view(args).disaggregation_transfer_backend}
    if scenario == "config-flag":
        start_up(model, "--disaggregation-transfer-backend", "spectrumkv_tcp", "--spectrumkv-config", sys.argv[3])
        return state()
    if scenario == "strict":
        backend = ("--disaggregation-transfer-backend", "spectrumkv_tcp")
        start_up(model, *backend, "--spectrumkv-strict", "--spectrumkv-config", sys.argv[3])
        return state()
    if scenario == "missing-argument-hook":
        import sglang.srt.arg_groups.pd_disaggregation_hook as hook

        sys.argv = ["launch_server", "--disaggregation-transfer-backend", "spectrumkv"]
        del hook.handle_pd_disaggregation
        start_up(model, "--disaggregation-transfer-backend", "spectrumkv")
        return state()
    if scenario in ("scheduler", "missing-in-scheduler"):
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        os.environ["SPECTRUMKV_ACTIVE"] = "spectrumkv"
        process = context.Process(target=scheduler, args=(scenario, answers))
        process.start()
        answer = answers.get(timeout=200)
        process.join(30)
        return answer
    raise ValueError(scenario)


if __name__ == "__main__":
    try:
        result = main(sys.argv[1], sys.argv[2])
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the error is what the scenario is about)
        result = {"error": type(error).__name__, "message": str(error)}
    print("RESULT " + json.dumps(result))

"""Prints every route that this vLLM can serve, as patterns of its own router. It runs inside the vLLM
environment, not in ours. It builds vLLM's application with every task and mode on, without an engine, and
prints a JSON list of {path, pattern} on its last line. `tests/contract/data/routes.json` is that list, for
runs without vLLM. `recording` calls this program.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

MODES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
FLAGS = {
    "enable_scale_out": True,
    "tokens_only": True,
    "enable_fault_tolerance": True,
    "enable_tokenizer_info_endpoint": True,
}


def all_routes() -> list[dict[str, str]]:
    """Return the routes, sorted, each once."""
    os.environ.update(MODES)
    # The import stands here, because our own environment imports this folder too.
    from vllm.config import ProfilerConfig  # noqa: PLC0415
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.tasks import GENERATION_TASKS, POOLING_TASKS  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    arguments: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
    for name, value in FLAGS.items():
        setattr(arguments, name, value)
    # The model claims every ability: the task only decides which routes are added.
    model: Any = SimpleNamespace(
        get_pooling_task=lambda _: "embed", hf_config=SimpleNamespace(num_labels=1), is_cross_encoder=True,
        architecture="", io_processor_plugin=None,
    )  # fmt: skip
    application = build_app(arguments, (*GENERATION_TASKS, *POOLING_TASKS), model)
    found = {(route.path, route.path_regex.pattern) for route in application.routes}
    return [{"path": path, "pattern": pattern} for path, pattern in sorted(found)]


if __name__ == "__main__":
    print(json.dumps(all_routes()))

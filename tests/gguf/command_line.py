"""`python command_line.py TREE FOLDER ARGUMENTS...`: the command `vllm`, up to where an engine starts.

Writes what the engine would load into FOLDER/engine.json instead of starting it. FOLDER also gets
the stub of the driver.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "gpu"), str(HERE.parent / "selection")]


def main() -> None:
    import cpu_vllm

    tree, folder, *arguments = sys.argv[1:]
    cpu_vllm.start(Path(tree), Path(folder))
    from vllm.entrypoints.cli.main import main as vllm_command
    from vllm.v1.engine.async_llm import AsyncLLM

    def would_load(vllm_config, **options):
        config = vllm_config.model_config
        facts = {
            "weights": config.model_weights or config.model,
            "config": config.hf_config_path or config.model,
            "served": config.served_model_name,
        }
        Path(folder, "engine.json").write_text(json.dumps(facts))
        os._exit(0)

    AsyncLLM.from_vllm_config = would_load
    sys.argv = ["vllm", *arguments]
    vllm_command()


if __name__ == "__main__":
    main()

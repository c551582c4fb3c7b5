"""Files that the processes of one gate share: models, oracles and what engines computed.

Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """The file or folder that `make` makes; of the processes that share it, one does.

    What `make` leaves is renamed when it is whole, and a process that dies lets the next one try.
    """
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            # Suffixes stay: numpy and the loaders look at them.
            unfinished = path.with_name(f"unfinished-{path.name}")
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            make(unfinished)
            unfinished.rename(path)
    return path


def key_of(job) -> str:
    """A name for what this job gives under the variables that vLLM has now."""
    # The gate's own, and the cache's folder, differ by process and change no result.
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and not name.startswith(("VLLM_GLM5_", "VLLM_CACHE_ROOT"))
    }
    text = json.dumps([job, variables], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

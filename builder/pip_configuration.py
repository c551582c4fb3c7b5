"""What pip is configured for: its files and ``PIP_*`` variables, as ``pip install`` obeys them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

from builder.credentials import variables_of_children

# Versions of pip print them in other orders; what counts is this: a later one overrides.
_SECTIONS = ("global", "install", ":env:")


def pip_configuration() -> dict[str, str]:
    """Return the options by name, such as ``index-url``; asked from pip, now.

    Without pip in this environment (uv makes such), its variables still count.
    """
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        env=variables_of_children(),
    )
    if said.returncode:
        return {
            name.removeprefix("PIP_").lower().replace("_", "-"): value
            for name, value in os.environ.items()
            if name.startswith("PIP_") and value
        }
    listed = [line.partition("=") for line in said.stdout.splitlines()]
    values = {}
    for section in _SECTIONS:
        for key, separator, quoted in listed:
            if separator and key.startswith(f"{section}."):
                value = str(ast.literal_eval(quoted))
                if value:  # pip takes an empty one for none
                    values[key.removeprefix(f"{section}.")] = value
    return values

"""Run by ``python -I -S``: maybe_override_with_speculators on models of each form, as JSON.

Arguments: a folder with the models, then folders for ``sys.path``, the tree first. For each model:
what came back, or the error, and how many bytes of its files were opened.
"""

import json
import os
import sys

sys.path[:0] = sys.argv[2:]
folder = sys.argv[1]

opened: list[str] = []


def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(folder):
        opened.append(os.path.relpath(arguments[0], folder))


sys.addaudithook(watch)

from vllm.transformers_utils.config import maybe_override_with_speculators  # noqa: E402


def attempt(model):
    opened.clear()
    try:
        found = maybe_override_with_speculators(
            model=model,
            tokenizer="org/tokenizer",
            trust_remote_code=False,
            vllm_speculative_config={"method": "mtp"},
        )
    except Exception as error:  # noqa: BLE001 - it is the result
        return {"error": f"{type(error).__name__}: {error}", "opened": sorted(set(opened))}
    return {"found": found, "opened": sorted(set(opened))}


results = {model: attempt(model) for model in json.load(sys.stdin)}
print("RESULTS " + json.dumps(results))

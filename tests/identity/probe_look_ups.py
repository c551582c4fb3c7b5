"""Run by ``python -I -S``: what each look-up of the distribution does, as JSON.

Arguments: folders for ``sys.path``, the tree first.
"""

import contextlib
import io
import json
import sys
import types

sys.path[:0] = sys.argv[1:]


def platform():
    import vllm.platforms
    import vllm.third_party
    from vllm.platforms.cpu import CpuPlatform

    # A machine with one GPU: NVML's real binding needs a driver.
    nvml = types.ModuleType("vllm.third_party.pynvml")
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 1
    vllm.third_party.pynvml = sys.modules[nvml.__name__] = nvml
    resolved = vllm.platforms.resolve_current_platform_cls_qualname()
    # For the other probes, as main() itself does for `vllm bench`: CudaPlatform needs a driver.
    vllm.platforms.current_platform = CpuPlatform()
    return resolved


def placeholder():
    from vllm.utils.import_utils import PlaceholderModule

    try:
        return PlaceholderModule("no_such_module_1234").attribute
    except ImportError as error:
        if error.__cause__ is None:  # PackageNotFoundError is an ImportError too
            raise
        return str(error)


def run_batch():
    from vllm.entrypoints.cli import run_batch as module

    async def batch(args):
        batches.append(args)

    batches, lines = [], []
    # Where it stands in v0.20.2, and in v0.33.0.
    for where in ("openai", "launchers"):
        stand_in = types.ModuleType(f"vllm.entrypoints.{where}.run_batch")
        stand_in.main = batch
        sys.modules[stand_in.__name__] = stand_in
    module.logger.info = lambda message, *args: lines.append(message % args)
    module.RunBatchSubcommand.cmd(types.SimpleNamespace(enable_metrics=False))
    for where in ("openai", "launchers"):
        del sys.modules[f"vllm.entrypoints.{where}.run_batch"]
    return [lines[0], len(batches)]


def command_line():
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "--version"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as exit_:
            return [exit_.code, out.getvalue().strip()]
    return None


def attempt(probe):
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{type(error).__name__}: {error}"


results = {
    probe.__name__: attempt(probe) for probe in (platform, placeholder, run_batch, command_line)
}
print("RESULTS " + json.dumps(results))

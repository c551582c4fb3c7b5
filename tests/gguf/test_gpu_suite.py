"""What the GPU suite's own checks see, where no GPU is needed to know it."""

from __future__ import annotations

import contextlib
import http.server
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cpu_vllm
import gguf_load_rate
import many_gpus
import numpy as np
import pytest
import test_many_gpus as suite
from gguf_suite import (
    call,
    least_saved,
    relative_l2,
    require_end,
    require_triton,
    still_running,
    top1,
    typical_distance,
)


@pytest.mark.parametrize(("modules", "count"), [(many_gpus.ATTENTION, 2), (many_gpus.MLPS, 3)])
def test_the_last_rank_is_silenced_and_no_other(modules, count, files, data):
    """The control of TP=8: were it to change nothing, any rank would look right beside it."""
    import gguf

    config = cpu_vllm.engine_config(files["q8_0"], data / "hf")
    model = cpu_vllm.load(config, rank=1, size=2)
    worker = SimpleNamespace(get_model=lambda: model)
    before = {name: tensor.clone() for name, tensor in cpu_vllm.parameters(model).items()}
    with cpu_vllm.ranks(config, 0, 2):
        assert many_gpus.silence_last_rank(worker, modules) == 0
    assert cpu_vllm.differing(cpu_vllm.parameters(model), before) == []
    with cpu_vllm.ranks(config, 1, 2):
        assert many_gpus.silence_last_rank(worker, modules) == count
    after = cpu_vllm.parameters(model)
    changed = cpu_vllm.differing(after, before)
    assert len(changed) == count
    for name in changed:
        assert any(module in name for module in modules), name
        assert before[name].any()
        assert not gguf.quants.dequantize(after[name].numpy(), gguf.GGMLQuantizationType.Q8_0).any()


def test_a_silent_rank_is_told_from_a_sum_in_another_order():
    """By the typical position: over all of them, a few that chose another expert weigh as much."""
    rng = np.random.default_rng(0)
    right = rng.standard_normal((400, 256))
    few = right.copy()
    few[:20] += 0.4 * rng.standard_normal((20, 256))
    silent = right + 0.09 * rng.standard_normal(right.shape)
    assert relative_l2(few, right) == pytest.approx(relative_l2(silent, right), abs=0.01)
    assert relative_l2(silent, right) < 0.10, "the bound for Q4_K would let it pass"
    assert 2 * typical_distance(few, right) < typical_distance(silent, right)
    assert top1(few, right) > 0.93


def test_the_log_says_what_was_chosen(platform, data, files, caplog_vllm, monkeypatch, request):
    """The arguments are in every log, whatever was chosen."""
    from vllm import logger as once
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla.indexer_logits import sparse_indexer_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setenv("VLLM_SPARSE_INDEXER_BACKEND", "triton")
    for cached in (sparse_indexer_backend, once._print_info_once):
        cached.cache_clear()
    request.addfinalizer(sparse_indexer_backend.cache_clear)
    arguments = "non-default args: {'attention_backend': 'TRITON_MLA_SPARSE'}\n"
    with pytest.raises(AssertionError):
        require_triton(arguments)
    config = cpu_vllm.engine_config(files["bf16"], data / "hf", dtype="bfloat16")
    # The first config of a process configures logging in later releases.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    chosen = AttentionSelectorConfig(
        576, config.model_config.dtype, "auto", None, use_mla=True, use_sparse=True
    )
    with set_current_vllm_config(config):
        # The test's platform has the selection of the tests' own; this is vLLM's.
        super(platform, platform).get_attn_backend_cls(
            AttentionBackendEnum.TRITON_MLA_SPARSE, chosen, 8
        )
    with pytest.raises(AssertionError):
        require_triton(arguments + caplog_vllm.text)
    sparse_indexer_backend()
    require_triton(arguments + caplog_vllm.text)


TOUCH = """
import mmap, pathlib, sys
import numpy as np

path, share = sys.argv[1], float(sys.argv[2])
with open(path, "rb") as file:
    data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
for start in range(0, len(data), 1 << 20):
    data[start : start + int(share * (1 << 20))].sum()
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_that_touches_all_of_a_file_is_seen(size, tmp_path):
    """The peak of a process counts the mapped pages that it touched, and no others."""
    path = tmp_path / "file"
    path.write_bytes(bytes(256 << 20))

    def peak_gib(share: float) -> float:
        command = [sys.executable, "-c", TOUCH, str(path), str(share)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout) / 2**20

    alone, limit = peak_gib(1.0), least_saved(size, 0.25)
    assert alone - peak_gib(1 / 3 + 2 / 3 / size) > limit
    assert alone - peak_gib(1.0) < limit


SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
sys.stdin.readline()
if {ends_child}:
    child.kill()
    child.wait()
if {hangs}:
    time.sleep(60)
sys.exit({status})
"""


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"ends_child": True, "hangs": False, "status": 1}, None),
        ({"ends_child": True, "hangs": True, "status": 1}, "the server still runs after 2 s"),
        ({"ends_child": False, "hangs": False, "status": 1}, "the server ended and left"),
    ],
)
def test_the_end_of_a_server(behaviour, words):
    """One that hangs, or that leaves a process which holds a GPU, is no server that ended."""
    import psutil

    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(**behaviour)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    children = []
    try:
        assert server.stdout.readline() == "ready\n"
        children = psutil.Process(server.pid).children(recursive=True)
        assert len(children) == 1
        server.stdin.write("\n")
        server.stdin.flush()
        began = time.monotonic()
        if words is None:
            assert require_end(server, children, 30) == 1
        else:
            with pytest.raises(pytest.fail.Exception, match=words):
                require_end(server, children, 2)
        assert time.monotonic() - began < 20
    finally:
        for process in [*children, server]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.communicate()


HELPER = """
import pathlib, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
print("all ranks wait", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("time.sleep(600)", "had not ended after 5 s:"),
        ("sys.exit('TheError')", "had not ended after 5 s:\nTheError"),
        ("rank.kill(); sys.exit('TheError')", "failed:\nTheError"),
    ],
)
def test_a_helper_that_hangs_leaves_no_rank(then, words, tmp_path):
    """One would hold the card from the tests that follow; and its log tells why it hung."""
    import psutil

    script, number = tmp_path / "helper.py", tmp_path / "rank"
    script.write_text(HELPER.format(then=then))
    with pytest.raises(pytest.fail.Exception) as failure:
        call(str(script), number, limit=5)
    assert words in str(failure.value)
    assert "all ranks wait" in str(failure.value)
    if psutil.pid_exists(pid := int(number.read_text())):
        assert not still_running([psutil.Process(pid)], 5)


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    [
        (None, 1, []),
        ("", 1, []),
        ("8", 1, [8]),
        (" 8 , 4,8,", 1, [4, 8]),
        ("2,4,8", 2, [4, 8]),
        ("4,8", 8, []),
        ("4,8", 0, []),
    ],
)
def test_the_sizes_that_share_a_card(asked, gpus, found, monkeypatch):
    monkeypatch.setattr(suite, "gpus", lambda: gpus)
    monkeypatch.delenv("VLLM_GLM5_SHARED_RANKS", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_GLM5_SHARED_RANKS", asked)
    assert suite.shared_sizes() == found


@pytest.mark.parametrize("wrong", ["3", "16", "1", "x", "-8"])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_a_size_that_nothing_can_have(wrong, gpus, monkeypatch):
    """Before 20 GB of a model are written for it."""
    monkeypatch.setattr(suite, "gpus", lambda: gpus)
    monkeypatch.setenv("VLLM_GLM5_SHARED_RANKS", f"4,{wrong}")
    with pytest.raises(ValueError, match=f"VLLM_GLM5_SHARED_RANKS='4,{wrong}' names {wrong}: give"):
        suite.shared_sizes()


def test_the_server_is_asked_without_the_proxy(monkeypatch):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"the server's")

        def log_message(self, *_):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the port that discards
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            answer = suite.post(f"http://127.0.0.1:{server.server_port}/", {}, 20)
        finally:
            server.shutdown()
    assert answer == "200 the server's"


def test_the_load_is_measured(files, data, monkeypatch):
    """In every release, whichever module calls what fills the model."""
    from vllm.model_executor.model_loader.gguf_mla import load

    fill, iterate = load.fill_model, load.iterate_weights

    def slowly(*arguments, **options):
        time.sleep(0.3)
        return iterate(*arguments, **options)

    config = cpu_vllm.engine_config(files["Q4_K_M"], data / "hf")
    expected = cpu_vllm.parameters(cpu_vllm.load(config))
    monkeypatch.setattr(load, "iterate_weights", slowly)
    figures: dict[str, float] = {}
    with gguf_load_rate.fill_measured(figures):
        model = cpu_vllm.load(cpu_vllm.engine_config(files["Q4_K_M"], data / "hf"))
    assert cpu_vllm.differing(cpu_vllm.parameters(model), expected) == []
    assert figures["load_s"] >= 0.3, "what reads the file is not measured"
    assert figures.keys() == {"load_s", "load_read_gib", "anonymous_growth_mib"}
    assert load.fill_model is fill


def test_a_load_that_was_not_measured_is_told(platform):
    """And an error of the load itself stays what it was."""
    with (
        pytest.raises(RuntimeError, match=r"nothing was measured: .*gguf_mla\.load\.fill_model"),
        gguf_load_rate.fill_measured({}),
    ):
        pass
    with pytest.raises(ZeroDivisionError), gguf_load_rate.fill_measured({}):
        raise ZeroDivisionError


RANK = """
import sys
rank, file, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, folder)
import torch
import torch.distributed as dist
from shared_card import HostCommunicator

dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
group = dist.new_group([0, 1, 2, 3], backend="gloo")
communicator = HostCommunicator(cpu_group=group, device_group=group)
own = torch.arange(6, dtype=torch.bfloat16).view(2, 3) + 10 * rank
before = own.clone()
total = communicator.all_reduce(own)
assert torch.equal(own, before), "vLLM's operation may not change what it is given"
assert total.dtype == own.dtype
assert total.tolist() == [[60, 64, 68], [72, 76, 80]]
columns = communicator.all_gather(own)
assert columns[0].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
assert communicator.all_gather(own, 0).shape == (8, 3)
gathered = communicator.gather(own, dst=2)
assert torch.equal(gathered, columns) if rank == 2 else gathered is None
dist.barrier()
"""


def test_ranks_that_share_a_card_add_up(tmp_path):
    """The collectives that stand for NCCL's in a test of TP=8 on one card."""
    folder = Path(many_gpus.__file__).parent
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting"), str(folder)],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said

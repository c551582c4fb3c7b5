"""What the engine benchmark counts, on a scheduler whose steps take a known time."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.build.killing import hear_interrupts

engine = pytest.importorskip("engine", reason="benchmarks/engine.py needs numpy")

STEP, ROW, TRACE = 0.01, 0.001, 100.0


class Scheduler:
    """As vLLM's: 8,192 tokens a step, first those that decode, then chunks of the prompts in order."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.requests: dict[str, SimpleNamespace] = {}
        self.most_new = 0

    def add_request(self, name, prompt, params) -> None:
        left = len(prompt["prompt_token_ids"])
        self.requests[name] = SimpleNamespace(left=left, new=0, most=params.max_tokens)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names) -> None:
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list:
        decoding = [name for name, one in self.requests.items() if not one.left]
        room, rows = 8192 - len(decoding), list(decoding)
        for name, one in self.requests.items():
            if one.left:
                chunk = min(one.left, room)
                one.left, room = one.left - chunk, room - chunk
                rows += [name] if not one.left else []
        for name in rows:
            self.requests[name].new += 1
            self.most_new = max(self.most_new, self.requests[name].new)
            if self.requests[name].new == self.requests[name].most:
                del self.requests[name]
        self.clock += STEP + ROW * len(rows)
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0])])
            for name in rows
        ]


@pytest.fixture
def scheduler(monkeypatch):
    scheduler = Scheduler()

    def traced(engine, kernels):
        kernels["attention"] = 1.0
        scheduler.clock += TRACE
        return engine.step()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(engine.time, "perf_counter", lambda: scheduler.clock)
    monkeypatch.setattr(engine, "traced", traced)
    return scheduler


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize(
    ("batch", "context"), [(1, 4096), (8, 4096), (64, 4096), (256, 4096), (8, 32_768)]
)
def test_a_step_counts_while_all_requests_decode(scheduler, batch, context, trace):
    """Of those that are prefilled first, many were done before the last one had a token."""
    row = engine.cell(SimpleNamespace(llm_engine=scheduler), batch, context, trace)
    assert row["decode_step_ms"] == pytest.approx((STEP + ROW * batch) * 1e3)
    assert row["decode_tokens_per_s"] == pytest.approx(batch / (STEP + ROW * batch))
    assert row["first_token_of_all_s"] < scheduler.clock
    assert scheduler.most_new < engine.new_tokens(batch, context)
    assert not scheduler.requests
    assert row.get("kernels_us", {}) == ({"attention": 1.0} if trace else {})


def test_requests_that_end_too_early_are_no_measurement(scheduler, monkeypatch):
    monkeypatch.setattr(engine, "new_tokens", lambda batch, context: 33)
    with pytest.raises(RuntimeError, match="steps of 64 requests at once, 32 are measured"):
        engine.cell(SimpleNamespace(llm_engine=scheduler), 64, 4096, trace=False)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_sparse_mla_kernel", "attention"),
        ("_merge_splits_kernel", "attention"),
        ("void vllm::moe::grouped_topk_fused_kernel<float, float, int>", "experts"),
        ("fused_moe_kernel", "experts"),
        ("void vllm::persistent::persistent_topk_kernel<2048>", "indexer"),
        ("void vllm::topKPerRowDecode<1024>", "indexer"),
        ("_mqa_logits_kernel", "indexer"),
        ("vllm::concat_and_cache_mla_kernel", "cache and rope"),
        ("nvjet_tst_64x8_64x16", "dense matrices"),
        ("triton_poi_fused_add", "rest"),
    ],
)
def test_a_kernel_counts_for_its_part_of_a_layer(kernel, part):
    assert engine.part_of(kernel) == part


ENGINE = """
import json, os, sys, time
backend, card = sys.argv[sys.argv.index("--backend") + 1], os.environ["CUDA_VISIBLE_DEVICES"]
began = time.time()
copy = {"3": 4.0e12, "5": 4.2e12}.get(card, 1.0)
print("CARD", json.dumps({"device": "a card", "copy_bytes_per_s": copy}), flush=True)
time.sleep(0.5)
row = {"backend": backend, "batch": 1, "context": 1, "left_out": card, "at": [began, time.time()]}
print("CELL", json.dumps(row), flush=True)
"""


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Run main with processes that only say where and when they ran; the cells that it stores."""
    script = tmp_path / "engine_process.py"
    script.write_text(ENGINE)
    file = tmp_path / "run.json"
    monkeypatch.setattr(engine, "__file__", str(script))
    needs = dict.fromkeys(("need_gpu", "need_folder"), lambda *_: None)
    monkeypatch.setitem(sys.modules, "sparse_timing", SimpleNamespace(**needs))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def run(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["engine.py", "--json", str(file), *arguments])
        engine.main()
        return json.loads(file.read_text())

    return run, file


def test_one_gpu_takes_the_backends_in_turn(engines):
    stored = engines[0]()
    first, second = stored["cells"]
    assert (first["left_out"], second["left_out"]) == ("3", "3")
    assert first["at"][1] <= second["at"][0]
    assert stored["at_once"] == 1


def test_each_gpu_takes_a_backend_at_once(engines):
    stored = engines[0]("--gpus", "0,1")
    cells = {row["backend"]: row for row in stored["cells"]}
    assert {cells[name]["left_out"] for name in engine.INDEXERS} == {"3", "5"}
    one, other = (row["at"] for row in cells.values())
    assert max(one[0], other[0]) < min(one[1], other[1])
    assert stored["at_once"] == 2
    assert stored["card"]["copy_bytes_per_s"] == 4.2e12


@pytest.mark.parametrize(
    ("more", "at_once"),
    [
        (["--gpus", "1,0"], 2),
        (["--gpus", "0,1,2"], 2),
        (["--gpus", "0,1", "--backends", "FLASHMLA_SPARSE"], 1),
    ],
)
def test_as_many_at_once_as_there_are_backends(engines, more, at_once):
    """The page says of a run with two that each had a card of its own, beside another."""
    assert engines[0](*more)["at_once"] == at_once


@pytest.mark.parametrize("gpus", ["0,0", "-1", "", "a"])
def test_a_gpu_is_named_once(engines, gpus, capsys):
    """Two engines of 120 GB on one card, and -1 is no card to CUDA."""
    with pytest.raises(SystemExit):
        engines[0](f"--gpus={gpus}")
    assert "argument --gpus" in capsys.readouterr().err


RUN = """
import sys, types
sys.path.insert(0, {benchmarks!r})
import engine
engine.__file__ = {script!r}
nothing = dict.fromkeys(("need_gpu", "need_folder"), lambda *_: None)
sys.modules["sparse_timing"] = types.SimpleNamespace(**nothing)
engine.main()
"""
ENDLESS = """
import fcntl, sys, time
sys.path.insert(0, {benchmarks!r})
import engine
if {watches}:
    engine.end_with_the_run()
lock = open(sys.argv[sys.argv.index("--backend") + 1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write("locked")
lock.flush()
time.sleep({seconds})
"""


def locked(file: Path) -> bool:
    """Whether the engine that locked the file still runs."""
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def until(holds, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


@pytest.mark.parametrize(
    ("how", "watches"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 1), (signal.SIGKILL, 0)],
)
def test_a_run_that_is_killed_leaves_no_engine(how, watches, tmp_path):
    """It would hold its GPU. The control is an engine that does not watch."""
    values = {"benchmarks": str(Path(engine.__file__).parent), "watches": watches}
    script, main = tmp_path / "endless.py", tmp_path / "main.py"
    script.write_text(ENDLESS.format(**values, seconds=60 if watches else 5))
    main.write_text(RUN.format(**values, script=str(script)))
    locks = [tmp_path / name for name in engine.INDEXERS]
    command = [sys.executable, str(main), "--gpus", "0,1"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,  # noqa: PLW1509
    ) as run:  # fmt: skip
        try:
            assert until(lambda: all(one.exists() and one.read_text() for one in locks), 30)
            run.send_signal(how)
            assert run.wait(10)
        finally:
            run.kill()
    ended = until(lambda: not any(map(locked, locks)), 10 if watches else 2)
    assert ended == bool(watches)


def test_an_engine_that_fails_loses_nothing_of_the_other(engines):
    run, file = engines
    script = file.parent / "engine_process.py"
    failing = "FLASHMLA_SPARSE"
    script.write_text(
        ENGINE.replace("time.sleep(0.5)", f"assert backend != {failing!r}; time.sleep(0.5)")
    )
    with pytest.raises(SystemExit, match=f"{failing}: the engine ended with 1"):
        run("--gpus", "0,1")
    (row,) = json.loads(file.read_text())["cells"]
    assert row["backend"] == "TRITON_MLA_SPARSE"

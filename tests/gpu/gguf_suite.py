"""What the GGUF tests of the GPU suite share: files, oracles, engines and measures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf_model
import numpy as np
import pytest
from made_once import key_of, once

HERE = Path(__file__).parent

LENGTHS = (256, 4096)
ORACLE_LIMIT_S = 300
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 4352,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "max_logprobs": -1,
    # Given, so that nothing is measured: several engines can then share the card.
    "kv_cache_memory_bytes": 4 << 30,
    "gpu_memory_utilization": 0.1,
    # The default compiles FlashInfer kernels for minutes.
    "moe_backend": "triton",
    "seed": 0,
}
# Few sizes: capturing takes longer than the tests.
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
EAGER = {"enforce_eager": True}


def call(script: str, *arguments, limit: int) -> str:
    """Run a helper of this folder in a process of its own; its output on failure."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    how = "failed"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            how = f"had not ended after {limit} s"
            end_group(process)
            said = process.communicate()
        finally:  # ranks that wait for each other would hold the card from the next tests
            end_group(process)
    output = "".join(said)
    if process.returncode:
        interesting = [line for line in output.splitlines() if "Error" in line]
        pytest.fail(
            f"{script} {how}:\n" + "\n".join(interesting[-5:]) + "\n...\n" + output[-6000:],
            pytrace=False,
        )
    return output


def end_group(process: subprocess.Popen) -> None:
    """Kill a process that leads a group, and what is left of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def centred(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - logits.mean(axis=-1, keepdims=True)


def relative_l2(ours: np.ndarray, oracle: np.ndarray) -> float:
    """Of centred logits, so that log-probabilities and logits compare."""
    assert ours.shape == oracle.shape
    assert np.isfinite(ours).all()
    return float(np.linalg.norm(centred(ours) - centred(oracle)) / np.linalg.norm(centred(oracle)))


def top1(ours: np.ndarray, oracle: np.ndarray) -> float:
    return float((ours.argmax(-1) == oracle.argmax(-1)).mean())


def require_triton(log: str) -> None:
    """That our backend and indexer were chosen; their names alone the log repeats as arguments."""
    assert re.search(r"Using \S*TRITON_MLA_SPARSE backend", log)
    assert "Sparse attention indexer: triton logits kernels" in log


def typical_distance(found: np.ndarray, right: np.ndarray) -> float:
    """The median over the positions of their relative L2."""
    each = [relative_l2(one[None], other[None]) for one, other in zip(found, right, strict=True)]
    return float(np.median(each))


def least_saved(size: int, whole: float) -> float:
    """How much less of a file a rank has to touch than one that takes all of it, at the least.

    A third is ffn_down_exps (more in Q4_K, where it is Q6_K), cut through rows that are less than a
    page: every rank touches all, and copies its slice before that goes to the GPU. So a quarter of
    the rest is asked for; a rank that touches the whole saves nothing.
    """
    return whole * 2 / 3 * (1 - 1 / size) / 4


def require_end(server: subprocess.Popen, others: list, limit: float) -> int:
    """Fail unless a server ends, and soon after it each of its processes (psutil's); its status."""
    try:
        status = server.wait(limit)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the server still runs after {limit} s")
    if left := still_running(others, limit):
        pytest.fail(f"the server ended and left {left}")
    return status


def still_running(processes: list, limit: float) -> list:
    """Those of the processes (psutil's) that run when so many seconds are over; a zombie has ended."""
    import psutil

    def runs(process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + limit
    while (left := [one for one in processes if runs(one)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


class Models:
    """GGUF files of one model, the folder with its config, and oracles for token sequences.

    `kind` is bf16, q8_0 or Q4_K_M.
    """

    def __init__(self, folder: Path, reference: Path | None, call) -> None:
        self.folder, self.reference, self.call = folder, reference, call
        if reference is None:
            self.config = gguf_model.CONFIG
            self.config_folder = once(folder / "config", self._write_config)
        else:
            self.config_folder = reference / "hf"
            self.config = json.loads((self.config_folder / "config.json").read_text())

    def _write_config(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))

    def tokens(self, count: int) -> list[int]:
        if self.reference is not None:
            return np.load(self.reference / "tokens.npz")[f"n{count}"].tolist()
        rng = np.random.default_rng(7)
        return rng.integers(2, self.config["vocab_size"], max(LENGTHS))[:count].tolist()

    def prompts(self, count: int = 8) -> list[list[int]]:
        """Prompts of different lengths; some longer than a KV cache block."""
        tokens = self.tokens(4096)
        return [tokens[61 * i : 61 * i + 24 + 37 * i] for i in range(count)]

    def file(self, kind: str) -> Path:
        if self.reference is not None:
            (path,) = self.reference.glob(f"*-{kind}.gguf")
            return path
        written = {"bf16": "BF16", "q8_0": "Q8_0", "Q4_K_M": "Q4_K"}[kind]
        return once(
            self.folder / f"generated-{kind}.gguf",
            lambda path: gguf_model.write_gguf(path, self.config, written),
        )

    def first_shard(self) -> Path:
        """The Q8_0 model as a set of shards."""
        if self.reference is not None:
            return min(self.reference.glob("*-split/*.gguf"))

        def write(folder: Path) -> None:
            folder.mkdir()
            gguf_model.write_gguf(folder / "generated.gguf", self.config, "Q8_0", per_shard=20)

        return min(once(self.folder / "split", write).glob("*.gguf"))

    def checkpoint(self, kind: str) -> Path:
        """A Hugging Face folder with the weights that the file holds."""
        file = self.file(kind)
        return once(
            self.folder / f"hf-{kind}",
            lambda folder: gguf_model.write_checkpoint(folder, self.config, [file]),
        )

    def oracle(self, kind: str, sequences: list[list[int]]) -> list[np.ndarray]:
        """Right logits: the reference's where it has them, else transformers in float32."""
        stored = [self._stored(kind, tokens) for tokens in sequences]
        if all(logits is not None for logits in stored):
            return stored
        key = key_of([kind, sequences])
        checkpoint = self.checkpoint(kind)

        def compute(out: Path) -> None:
            job = out.with_suffix(".json")
            job.write_text(json.dumps(sequences))
            self.call("gguf_model.py", "oracle", checkpoint, job, out, limit=ORACLE_LIMIT_S)

        arrays = np.load(once(self.folder / f"oracle-{key}.npz", compute))
        return [arrays[f"logits_{i}"] for i in range(len(sequences))]

    def _stored(self, kind: str, tokens: list[int]) -> np.ndarray | None:
        if self.reference is None:
            return None
        source = "hf" if kind == "bf16" else f"deq-{kind}"
        (path, *_) = [
            *self.reference.glob(f"logits/*.{len(tokens)}.{source}.npz"), None,
        ]  # fmt: skip
        if path is None or tokens != self.tokens(len(tokens)):
            return None
        return np.load(path)["logits"].astype(np.float32)

    def with_swapped_gate_and_up(self) -> Path:
        """The BF16 file with the names of ffn_gate and ffn_up exchanged: a wrong model."""
        data = self.file("bf16").read_bytes()
        return once(self.folder / "swapped.gguf", lambda path: path.write_bytes(_exchange(data)))


def _exchange(data: bytes) -> bytes:
    """Exchange the data of gate and up tensors by exchanging their offsets in the table."""
    import struct

    def place(name: bytes) -> int | None:
        at = data.find(struct.pack("<Q", len(name)) + name)
        if at < 0:
            return None
        at += 8 + len(name)
        dims = struct.unpack_from("<I", data, at)[0]
        return at + 4 + 8 * dims + 4

    out = bytearray(data)
    for layer in range(200):
        for kind in (b"", b"_exps", b"_shexp"):
            gate = place(b"blk.%d.ffn_gate%s.weight" % (layer, kind))
            up = place(b"blk.%d.ffn_up%s.weight" % (layer, kind))
            if gate and up:
                out[gate : gate + 8], out[up : up + 8] = data[up : up + 8], data[gate : gate + 8]
    assert out != data
    return bytes(out)


class Result:
    def __init__(self, path: Path, log: str) -> None:
        arrays = np.load(path)
        self.facts = json.loads(str(arrays["facts"]))
        self.arrays = {name: arrays[name] for name in arrays.files if name != "facts"}
        self.log = log

    def all(self, name: str) -> list[np.ndarray]:
        count = sum(key.rpartition("_")[0] == name for key in self.arrays)
        return [self.arrays[f"{name}_{i}"] for i in range(count)]


class Engines:
    def __init__(self, folder: Path, call, limit: int) -> None:
        self.folder, self.call, self.limit = folder, call, limit

    def __call__(self, engine: dict, *, score=(), generate=None) -> Result:
        job = {"engine": ENGINE | engine, "score": list(score), "generate": generate}
        key = key_of(job)
        log = self.folder / f"{key}.log"

        def run(out: Path) -> None:
            request = out.with_suffix(".json")
            request.write_text(json.dumps(job))
            log.write_text(self.call("gguf_engine.py", request, out, limit=self.limit))

        out = once(self.folder / f"{key}.npz", run)
        return Result(out, log.read_text())


def gguf_engine(models: Models, file: Path, **changes) -> dict:
    return {"model": str(file), "hf_config_path": str(models.config_folder)} | changes

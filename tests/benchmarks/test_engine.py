"""What the engine benchmark counts, on a scheduler whose steps take a known time."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

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

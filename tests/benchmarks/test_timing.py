"""What graph_time counts, on a card whose calls and launches take a known time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

timing = pytest.importorskip("sparse_timing", reason="needs torch")

LAUNCH = 7.0


class Card:
    """torch.cuda's part: a graph's replay takes its launch, and what its calls take."""

    def __init__(self) -> None:
        self.clock, self.replays, self.held = 0.0, [], None
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = card.clock

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end) -> float:
                return (end.at - self.at) / 1e3

        class CUDAGraph:
            def replay(self) -> None:
                card.clock += LAUNCH + self.takes
                card.replays.append(self.takes)

        class Capture:
            def __init__(self, graph) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                self.began = card.clock

            def __exit__(self, *_) -> None:
                # Captured, not run.
                self.graph.takes, card.clock = card.clock - self.began, self.began

        self.Event, self.CUDAGraph, self.graph = Event, CUDAGraph, Capture

    def synchronize(self) -> None:
        pass


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=card))
    return card


@pytest.mark.parametrize(
    "calls", [[8.0] * 40, [45.0, 47.0], [1100.0, 1110.0], [9000.0], [0.01, 0.01]]
)
def test_a_call_is_charged_little_of_the_launch(card, calls):
    def call(takes: float):
        def run() -> None:
            card.clock += takes

        return run

    found = timing.graph_time([call(takes) for takes in calls])
    mean = sum(calls) / len(calls)
    longest = card.replays[-1]
    assert found == pytest.approx(mean * (1 + LAUNCH / longest))
    assert found < 1.005 * mean or mean < 1
    # Whole rounds, no more of them than make the graph long.
    rounds = longest / sum(calls)
    assert rounds == pytest.approx(round(rounds))
    assert longest < timing.GRAPH_US + sum(calls)
    assert card.replays.count(longest) >= 5

"""Parameter servers in place of an all-reduce: against a simulation, message by message, and by hand."""

from __future__ import annotations

import heapq

import pytest

from command_line import document, typed
from loadgauge.core.estimate.time.bandwidth_needs import served_step


def simulated(
    beside: float, sent: float, ranks: int, speed: float, updates: int, chunks: int, *, waits: bool
) -> tuple[float, float]:
    """Seconds between the updates of a rank, and how many updates by others lie between its weights and its gradients.

    One server, whose port takes the chunks of all ranks in turn (one chunk: gradients of one rank after another), and gives
    weights through another port in turn.
    """
    chunk = sent / chunks / speed
    ports, done, events, version = [0.0, 0.0], 0, [], 0
    for rank in range(ranks):  # (when, rank, way: 0 in, 1 out, chunks that are left)
        heapq.heappush(events, (beside, rank, 0, chunks))
    seen, ages, ends, waiting = [0] * ranks, [], [], []
    while done < updates * ranks:
        when, rank, way, left = heapq.heappop(events)
        ports[way] = max(ports[way], when) + chunk
        if left > 1:
            heapq.heappush(events, (ports[way], rank, way, left - 1))
        elif way == 0:
            ages.append(version - seen[rank])
            version += 1
            done += 1
            waiting.append((ports[0], rank))
            if not waits or len(waiting) == ranks:
                begin = ports[0]
                for _, each in waiting:
                    seen[each] = version
                    heapq.heappush(events, (begin, each, 1, chunks))
                waiting = []
        else:
            ends.append(ports[1])
            heapq.heappush(events, (ports[1] + beside, rank, 0, chunks))
    rounds = len(ends) // ranks // 2
    late = ages[len(ages) // 2 :]
    return (ends[-1] - ends[-1 - rounds * ranks]) / rounds, sum(late) / len(late)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
@pytest.mark.parametrize("beside", [0.5, 3.0, 40.0])
def test_a_step_with_a_server_is_that_of_a_simulation(ranks: int, beside: float) -> None:
    """Ranks that wait come at once and share the port; others come in turn; sharing costs up to a fifth."""
    step, _ = simulated(beside, 100.0, ranks, 100.0, 40, 60, waits=True)
    assert served_step(beside, 100.0, ranks, 1, 100.0, waits=True) == pytest.approx(step, rel=0.03)
    free = served_step(beside, 100.0, ranks, 1, 100.0, waits=False)
    step, age = simulated(beside, 100.0, ranks, 100.0, 60, 1, waits=False)
    assert (free, ranks - 1) == (pytest.approx(step, rel=0.005), pytest.approx(age, abs=0.5))
    shared, _ = simulated(beside, 100.0, ranks, 100.0, 40, 60, waits=False)
    assert 0.995 * free <= shared <= 1.2 * free


def test_servers_enough_for_all_are_no_bottleneck_and_fewer_share_their_adapters() -> None:
    for waits in (True, False):
        assert served_step(1, 100, 8, 8, 100, waits=waits) == 3
        assert served_step(1, 100, 8, 80, 100, waits=waits) == 3
    assert served_step(1, 100, 8, 2, 100, waits=True) == 1 + 2 * 4
    assert served_step(1, 100, 8, 2, 100, waits=False) == 4  # 2 in and 2 out would be 3, but a server sends for four


def test_the_network_has_both_beside_the_all_reduce() -> None:
    line = "network llama-2-13b --gpu a100-sxm4-80gb --gpus 64 --tp 8 --zero 0 --nic-bandwidth 25GB/s"
    told = document(f"{line} --parameter-servers 8")
    waits, free, *_ = told["what_if"]
    (sent,) = (row["payload"] * row["calls_per_step"] for row in told["network"] if row["axis"] == "dp")
    exposed = sum(row["exposed_seconds"] for row in told["network"] if row["axis"] == "dp")
    speed = 25e9 * told["fabric"]["outer_efficiency"]
    assert waits["step"] == pytest.approx(told["step"] - exposed + 2 * sent * 8 / speed)
    assert free["step"] == pytest.approx(max(told["step"] - exposed + 2 * sent / speed, 8 * sent / speed))
    assert "7 updates old" in free["name"]
    assert len(document(line)["what_if"]) == len(told["what_if"]) - 2
    refused = typed(f"{line.replace('--zero 0', '--zero 1')} --parameter-servers 8")
    assert (refused.code, "--zero 0" in refused.err) == (2, True)

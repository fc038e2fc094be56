"""Traffic of a step and the bandwidth that it needs, by the code of `loadgauge network`."""

from typing import Any

import msgspec

from loadgauge.core.answers.figure import Figure
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.bandwidth_needs import Need, Network, NetworkCase
from loadgauge.core.resolve.setup import Setup


def setup_of(given: Setup) -> NetworkCase | None:
    """Return the case of `loadgauge network`; None without links, or where a measured run rescales the time."""
    if given.gpu is None or given.cluster is None or given.job.measured is not None:
        return None
    return NetworkCase.of(given.model, given.layout, given.training, given.cluster, of_cluster(given.cluster))


@Figure(title="What the network must carry", form="table", order=5)
def network(result: Estimate) -> list[dict[str, Any]] | None:
    """Return a row for each axis and moment; None where `loadgauge network` has no answer."""
    if result.time is None or result.time.scale != 1.0:
        return None
    return rows(NetworkCase.of_step(result.workings.step).answer())


def rows(network: Network) -> list[dict[str, Any]]:
    """Return a row for each need: bytes of the slowest link, the window [s], bandwidths [byte/s], exposed seconds."""
    return [row(need) for need in network.needs]


def row(need: Need) -> dict[str, Any]:
    """Return one need as plain values: bytes, seconds and byte/s."""
    return {
        "axis": need.axis,
        "what": need.what,
        "ranks": need.ranks,
        "bytes_per_step": need.carried,
        "seconds": need.seconds,
        "window_seconds": need.window,
        "overlapped": need.overlapped,
        "need": need.needed,
        "have": need.bandwidth,
        "reached": need.reached,
        "link": need.link,
        "hidden": need.hidden,
        "ok": need.enough,
        "exposed_seconds": need.shown,
    }


def what_if(given: Setup, nic: float) -> dict[str, Any] | None:
    """Return the rows and the step [s] with another network adapter of `nic` byte/s per GPU; None as in `network`."""
    setup = setup_of(given)
    if setup is None:
        return None
    before = setup.answer()
    other = setup.on(msgspec.structs.replace(setup.fabric, outer_bandwidth=nic)).answer()
    return {
        "nic": nic,
        "rows": rows(other),
        "step": other.step,
        "step_before": before.step,
        "step_delta": other.step - before.step,
        "exposed": other.exposed,
        "enough": other.enough,
    }

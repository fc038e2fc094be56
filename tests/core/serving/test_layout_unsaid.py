"""The replica of a model that is served where nothing is said of it, and what is advised where none holds it."""

import pytest

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.families.catalogue import model
from loadgauge.core.resolve.inference import fitting, resolve_inference
from loadgauge.core.serving.passes import split

ASKED = {"context": 4096}


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "replica"),
    [
        ("llama-3.1-70b", "h100-sxm5-80gb", 8, 2),
        ("llama-3.1-8b", "h100-sxm5-80gb", 8, 1),
        ("llama-3.1-405b", "h200-sxm-141gb", 16, 8),
    ],
)
def test_as_few_gpus_hold_a_replica_as_can(model, gpu, gpus, replica):
    """One GPU fewer by halves does not hold it, said as flags."""
    job = Job(model, gpu=gpu, gpus=gpus)
    answer, assumed = resolve_inference(job, "generate", ASKED)
    assert (answer.asked.tp * answer.asked.pp, answer.asked.replicas) == (replica, gpus // replica)
    assert answer.memory.verdict == "fits"
    assert ("--tp" in assumed) == (replica > 1)
    if replica > 1:
        half, _ = resolve_inference(job.replace(tp=replica // 2), "generate", ASKED)
        assert half.memory.verdict != "fits"


def test_a_replica_that_is_said_is_kept():
    answer, _ = resolve_inference(Job("llama-3.1-70b", gpu="h100-sxm5-80gb", gpus=8, tp=1), "generate", ASKED)
    assert (answer.asked.tp, answer.memory.verdict) == (1, "does not fit")


def test_what_is_advised_fits_as_it_says():
    job = Job("llama-3.1-405b", gpu="h100-sxm5-80gb", gpus=8)
    tried = dict(fitting(job, "generate", ASKED))
    assert list(tried) == ["--weight-format fp8", "--gpus 16 --tp 8 --pp 2"]
    said, _ = resolve_inference(job.replace(tp=8), "generate", ASKED | {"weight_format": "fp8"})
    assert said.memory.total == tried["--weight-format fp8"].memory.total


def test_weights_are_as_their_publisher_stores_them():
    """671 B parameters in 8 bits, embedding and head in 16 (DeepSeek-V3's repository: 688.6 GB with its MTP module)."""
    answer, assumed = resolve_inference(Job("deepseek-v3", gpu="h200-sxm-141gb", gpus=8), "generate", ASKED)
    assert "fp8" in assumed["--weight-format"]
    assert 8 * answer.memory.weights == pytest.approx(671e9, rel=0.02)


@pytest.mark.parametrize("stages", [2, 3, 4, 7, 16])
def test_layers_that_do_not_divide_are_shared_out_as_engines_do(stages):
    """One each, from the last stage but one on downwards, as vLLM's `get_pp_indices` does it one by one."""
    counts = [61 // stages] * stages
    for place in range(2, 61 % stages + 2):
        counts[-place] += 1
    asked = Inference(task="generate", context=64, answer=1, pp=stages)
    assert [stage.stop - stage.start for stage in split(model("deepseek-v3"), asked)] == counts


def test_nodes_without_a_stated_network_have_the_usual_one():
    answer, assumed = resolve_inference(
        Job("deepseek-v3", gpu="h800-sxm5-80gb", gpus=16, tp=8, pp=2), "generate", ASKED
    )
    told, _ = resolve_inference(
        Job("deepseek-v3", gpu="h800-sxm5-80gb", gpus=16, tp=8, pp=2, nic_bandwidth="400Gbit/s"), "generate", ASKED
    )
    assert assumed["--nic-bandwidth"].startswith("400Gbit/s")
    assert not answer.untimed
    assert answer.to_dict() == told.to_dict()


def test_a_server_without_room_for_one_request_does_not_fit_and_a_larger_share_is_advised_first():
    job, asked = Job("glm-4.6", gpu="h20-96gb", gpus=8, tp=8), ASKED | {"server": "sglang"}
    answer, _ = resolve_inference(job, "generate", asked)
    bare, _ = resolve_inference(job, "generate", ASKED)
    assert (bare.memory.verdict, answer.memory.verdict) == ("fits", "does not fit")
    assert answer.pool is not None
    assert answer.pool[1] < ASKED["context"]
    flags, after = next(fitting(job, "generate", asked))
    assert flags.startswith("--server sglang:static_fraction=0.9")
    assert after.memory.verdict == "fits"
    assert after.pool is not None
    assert after.pool[1] >= ASKED["context"]

"""A tower that is trained before a language model that is not: gradients go through its layers, and none of its weights has one."""

from __future__ import annotations

import pytest

from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import model

TOWER, JOINT = 676_550_144, 5120**2 + 5120 + 5120 * 3584 + 3584 + 1280
"""Parameters of Qwen2.5-VL's tower, and of what joins it: a norm, and two linear layers over four patches."""


def of(train: str | None, tower: str) -> Estimate:
    return estimate(
        Job("qwen2.5-vl-7b", gpu="h100", gpus=1, seq_len=4096, pictures="1x1024x768", train=train, tower=tower)
    )


def test_the_language_model_has_no_gradients_of_weights_and_hands_on_those_of_its_input() -> None:
    whole, alone, joint = of(None, "trained"), of("tower", "trained"), of("tower", "projector")
    assert [one.memory.parts["optimizer"] for one in (alone, joint)] == [4 * TOWER, 4 * JOINT]
    text = model("qwen2.5-vl-7b")
    matrices = parameters(text).total - text.vocab_size * text.hidden_size
    assert whole.flops.hardware - alone.flops.hardware == pytest.approx(2 * 4096 * matrices, rel=1e-3)
    assert whole.flops.forward == alone.flops.forward == joint.flops.forward
    # Of the tower's own layers no gradient is made where only what joins it is trained.
    assert joint.flops.hardware < alone.flops.hardware - 2 * 3996 * (TOWER - JOINT)
    assert joint.memory.parts["activations"] < alone.memory.parts["activations"] < whole.memory.parts["activations"]


def test_parts_of_the_language_model_may_be_trained_beside_it() -> None:
    text = model("qwen2.5-vl-7b")
    head = text.vocab_size * text.hidden_size
    assert of("tower,lm_head", "projector").memory.parts["optimizer"] == 4 * (JOINT + head)


def test_a_tower_sees_or_hears_something() -> None:
    with pytest.raises(ConfigError, match="tower needs --pictures"):
        estimate(Job("qwen2.5-vl-7b", gpu="h100", seq_len=4096, train="tower"))

"""Heads other than a language model's: which one a config means, and what it is trained on, against transformers' own step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from loadgauge.core.base.errors import ConfigError  # noqa: E402
from loadgauge.core.definitions.job.job import Job  # noqa: E402
from loadgauge.pytorch.capture.capture import Captures  # noqa: E402
from loadgauge.pytorch.capture.inputs.heads import head_class, words  # noqa: E402
from loadgauge.pytorch.capture.inputs.kinds import of_config  # noqa: E402
from loadgauge.pytorch.capture.inputs.libraries import _loss  # noqa: E402
from loadgauge.pytorch.capture.record import record  # noqa: E402
from loadgauge.pytorch.trace.torch_run import TorchRun  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
RUN = TorchRun.of(Job(model="", seq_len=1, precision="fp32", optimizer="sgd"))


def bert(**more: object) -> transformers.BertConfig:
    return transformers.BertConfig(**SMALL, max_position_embeddings=64, **more)


@pytest.mark.parametrize(
    ("named", "word"),
    [("BertForSequenceClassification", "classification"), ("BertForTokenClassification", "tokens"), ("BertModel", "embedding"),
     ("BertForQuestionAnswering", "answers")],
)  # fmt: skip
def test_a_config_says_its_head(named: str, word: str) -> None:
    found = head_class(bert(architectures=[named]), "")
    assert found is not None
    assert (found[0], found[1].__name__) == (word, named)
    assert head_class(bert(architectures=["BertForMaskedLM"]), "") is None


def test_an_unknown_head_and_a_model_without_it() -> None:
    with pytest.raises(ConfigError, match="did you mean embedding"):
        head_class(bert(), "embeding")
    with pytest.raises(ConfigError, match="has no ctc head"):
        head_class(bert(), "ctc")
    assert "classification" in words()


def test_two_texts_are_two_forwards_and_a_row_of_likenesses() -> None:
    """Parameters are the class's; FLOPs those of both texts, and of b x b likenesses."""
    job = of_config(bert(), RUN, head="embedding")
    assert job.names == ("b", "s", "t")
    small, large = (record(job, {"b": b, "s": 24, "t": 17}) for b in (3, 6))
    assert sum(small.parameters.values()) == sum(one.numel() for one in transformers.BertModel(bert()).parameters())
    few, many = (sum(op.flops for op in run.ops[run.second :] if op.flops) for run in (small, large))
    pairs = 3 * 2 * 3 * 3 * SMALL["hidden_size"]
    assert many - 2 * few == 2 * pairs  # linear in b, but for the likenesses


def test_a_classifier_is_captured_at_sizes_never_run() -> None:
    captures = Captures(of_config(bert(architectures=["BertForSequenceClassification"], num_labels=1), RUN), "bert")
    found = captures.at(b=3, s=24)
    assert not found.plain
    plain = record(captures.job, {"b": 5, "s": 37})
    assert found.kept_bytes(b=5, s=37) == sum(plain.kept)
    assert found.holds(b=5, s=37)


def test_a_detector_matches_as_many_pairs_as_scipy_always_does() -> None:
    """FLOPs of a step on real pictures, where there are fewer queries than objects, and more."""
    pytest.importorskip("scipy")
    for queries, objects in ((10, 4), (3, 6)):
        config = transformers.YolosConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=[32, 48], num_labels=5,
            num_detection_tokens=queries, attn_implementation="eager", architectures=["YolosForObjectDetection"],
        )  # fmt: skip
        eager = TorchRun.of(Job(model="", seq_len=1, precision="fp32", optimizer="sgd", attention="eager"))
        job = of_config(config, eager)
        assert job.names == ("b", "k", "h", "w")
        found = record(job, {"b": 2, "k": objects, "h": 32, "w": 48})
        model = transformers.YolosForObjectDetection(config).train()
        boxes = torch.cat([0.4 + 0.2 * torch.rand(objects, 2), torch.full((objects, 2), 0.1)], 1)
        labels = {"class_labels": torch.randint(0, 5, (objects,)), "boxes": boxes}
        with FlopCounterMode(display=False) as counter:
            model(pixel_values=torch.rand(2, 3, 32, 48), labels=[labels] * 2).loss.backward()
        assert sum(op.flops for op in found.ops[found.second :] if op.flops) == counter.get_total_flops()
        matched = min(queries, objects)
        kept = [size for size, by in zip(found.kept, found.kept_by, strict=True) if by[0] == "AbsBackward0"]
        assert kept == [2 * matched * 4 * 4], kept  # the differences of boxes that are matched


def test_a_segmentation_has_a_class_for_each_pixel() -> None:
    """torchvision's models give a dictionary of (sequences, classes, height, width), of which each is a loss."""
    shapes = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    results = {name: torch.empty(2, 21, 8, 6, device="meta", requires_grad=True) for name in ("out", "aux")}
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        _loss("classes", results)
    assert shapes.count(((2, 21, 8, 6), torch.float32)) == 4  # of log-softmax, and of the loss
    assert shapes.count(((2, 8, 6), torch.int64)) == 2

"""Scripts that ask for published weights: the model is made as for them, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from in_process import in_process  # noqa: E402
from loadgauge.core.definitions.job.job import Job  # noqa: E402
from loadgauge.core.estimate.states.parameters import parameters  # noqa: E402
from loadgauge.core.families.catalogue import keys  # noqa: E402
from loadgauge.pytorch.capture.inputs.libraries import usual_fields  # noqa: E402
from loadgauge.pytorch.capture.inputs.pretrained import without_weights  # noqa: E402
from loadgauge.pytorch.capture.road import road  # noqa: E402

CLASSIFIER = """
import torch
from torch import nn
from transformers import {kind}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = {kind}.from_pretrained("bert-base-uncased", dtype={dtype})
        self.head = nn.Linear(768, 3, dtype={dtype})

    def forward(self, ids):
        return self.head(self.body(ids).last_hidden_state[:, 0]).float().mean()

def batch(b, s=16):
    return torch.zeros(b, s, dtype=torch.long)
"""


@pytest.mark.parametrize(("kind", "dtype"), [("AutoModel", "torch.float32"), ("BertModel", "torch.bfloat16")])
def test_a_published_encoder_is_made_of_its_configuration(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / f"{kind.lower()}_net.py"
    file.write_text(CLASSIFIER.format(kind=kind, dtype=dtype))
    found = road(Job(f"{file}:Net", micro_batch=2, precision=None if "32" in dtype else "bf16-pure"), "").spec
    own = {key: value for key, value in keys("bert-base-uncased").items() if key != "architectures"}
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**own))
    assert parameters(found).total == sum(one.numel() for one in model.parameters()) + 768 * 3 + 3
    assert found.dtype == dtype.removeprefix("torch.")


def test_what_was_not_fetched_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("import torch\n")
    net, load = torch.nn.Linear(2, 2), torch.nn.Module.load_state_dict
    with without_weights(str(file)):
        state = torch.hub.load_state_dict_from_url("https://example.org/weights.pth")
        net.load_state_dict(state)
        net.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert float(net.weight.detach().sum()) == 4.0
    assert torch.nn.Module.load_state_dict is load
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({})


def test_a_detection_network_is_estimated_in_single_precision() -> None:
    keys = {"library": "torchvision", "_class_name": "fcos_resnet50_fpn"}
    assert usual_fields(Job(model=""), keys) == (("precision", "fp32"),)
    assert usual_fields(Job(model="", precision="bf16-autocast"), keys) == ()
    assert usual_fields(Job(model=""), keys | {"_class_name": "resnet50"}) == ()

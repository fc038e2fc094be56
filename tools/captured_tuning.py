"""Compare captured models of which a part is trained with the trace of the very step, and write docs/captured-tuning.md.

The oracle is PEFT itself (`get_peft_model`) or `requires_grad_(False)`, on all layers, at the sizes that are asked for.

python tools/captured_tuning.py OUT.json [type ...]     results so far
python tools/captured_tuning.py OUT.json --page         docs/captured-tuning.md of them
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

import loadgauge
from loadgauge.core.base.errors import Error, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.rank_memory import stages
from loadgauge.core.estimate.result import Estimate
from loadgauge.pytorch.capture import road
from loadgauge.pytorch.capture.inputs.kinds import of_config
from loadgauge.pytorch.capture.record import Recorded, record
from loadgauge.pytorch.capture.requests import list_request
from loadgauge.pytorch.trace import subprocess
from loadgauge.pytorch.trace.programs.training import Sized
from loadgauge.pytorch.trace.torch_run import TorchRun
from small_models import small_config

PAGE = Path(__file__).parents[1] / "docs" / "captured-tuning.md"
RANK = 8
SIZES = {"b": 6, "s": 400}
LAYERS = 4
LORA: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": RANK},
    "LoRA, dropout, checkpointed": {"lora_rank": RANK, "lora_dropout": 0.05, "recompute": "full"},
    "LoRA, pure 16 bits": {"lora_rank": RANK, "precision": "bf16-pure"},
    "LoRA, attention": {"lora_rank": RANK, "lora_targets": "attention"},
    "DoRA": {"lora_rank": RANK, "use_dora": True},
    "LoRA, last layers": {"lora_rank": RANK, "lora_layers": "2:"},
}
USUAL = ("LoRA", "LoRA, dropout, checkpointed")
PARTS: dict[str, dict[str, Any]] = {
    "last layer and head": {"train": "layers.-1:,lm_head"},
    "not the embedding": {"train": "but:embed_tokens"},
    "MLPs of two layers": {"train": r".*layers\.[12]\.mlp"},
    "upper half, checkpointed": {"train": "layers.2:", "recompute": "full"},
}
TOWERS: dict[str, dict[str, Any]] = {
    "not the tower": {"train": "but:vision_tower"},
    "projector alone": {"train": "multi_modal_projector"},
    "tower alone": {"train": "vision_tower"},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "bitnet": {name: LORA[name] for name in USUAL} | {"upper half": {"train": "layers.2:"}},
    "llama": {name: (LORA | PARTS)[name] for name in (*USUAL, "DoRA", "last layer and head", "MLPs of two layers")},
    "paligemma": {"LoRA": LORA["LoRA"]} | TOWERS,
    "t5": {"LoRA": LORA["LoRA"], "decoder alone": {"train": "decoder"}},
    "mixtral": {"LoRA": LORA["LoRA"], "upper half": {"train": "layers.2:"}},
    "lfm2": {"LoRA": LORA["LoRA"], "upper half": {"train": "layers.2:"}},
    "gpt2": {"LoRA": LORA["LoRA"], "upper half": {"train": "h.2:"}},
    "qwen3": {name: LORA[name] for name in USUAL},
    "bart": {"LoRA": LORA["LoRA"], "decoder alone": {"train": "decoder"}},
    "bert": {"LoRA": LORA["LoRA"], "upper half": {"train": "layer.2:,cls"}},
}
LONG = {"llava": 700}
"""Tokens of a sequence, where its picture needs more."""


def oracle(config: Any, fields: dict[str, Any], sizes: dict[str, int]) -> tuple[Recorded, int]:
    """The recording of the very step with PEFT's own modules, or with frozen parameters; and how many parameters are trained."""
    precision = fields.get("precision", "bf16")
    run = TorchRun.of(
        Job(model="", seq_len=1, precision="bf16-pure", optimizer="sgd", recompute=fields.get("recompute", "none"))
    )
    if precision == "bf16":
        recipe = loadgauge.training("huggingface", "bf16-autocast-8", "sgd")
        run = msgspec.structs.replace(run, training=recipe)
    job = of_config(config, run)
    trained: list[int] = []

    def build(device: str) -> Any:
        import peft

        module = job.build(device)
        if "lora_rank" in fields:
            targets = fields.get("lora_targets", "all-linear")
            if targets == "attention":
                targets = r".*attn.*\.[a-z_]+"
            layers = fields.get("lora_layers")
            how = peft.LoraConfig(
                r=RANK, target_modules=targets, lora_dropout=fields.get("lora_dropout", 0.0), use_dora="use_dora" in fields,
            )  # fmt: skip
            if layers:
                first = int(layers.rstrip(":"))
                numbers = "|".join(map(str, range(first, LAYERS)))
                how.target_modules = rf".*layers\.({numbers})\..*_proj"
            import torch

            with torch.device(device):
                peft.get_peft_model(module, how, autocast_adapter_dtype=precision == "bf16")
        else:
            chosen = trained_names(module, fields["train"])
            for name, one in module.named_parameters():
                one.requires_grad_(name in chosen)
        if fields.get("recompute") == "full":
            module.enable_input_require_grads()
        trained.append(sum(one.numel() for one in module.parameters() if one.requires_grad))
        return module

    own = Sized(build, job.inputs, job.loss, run, job.names)
    return record(own, {name: sizes.get(name, sizes["s"]) for name in job.names}), trained[0]


def trained_names(module: Any, words: str) -> set[str]:
    """Names of parameters, by hand: what the words of `PARTS` and `TOWERS` mean in these models."""
    import re

    aliases: dict[int, list[str]] = {}
    for name, one in module.named_parameters(remove_duplicate=False):  # a tied one has several names
        aliases.setdefault(id(one), []).append(name)
    found = set()
    for name, one in module.named_parameters():
        layer = re.search(r"(?:layers|h|layer)\.(\d+)\.", name)
        number = int(layer.group(1)) if layer else -1
        for word in words.split(","):
            lower = re.fullmatch(r"(?:layers|h|layer)\.(-?\d+):", word)
            if lower:
                hit = number >= int(lower.group(1)) % LAYERS
            elif word.startswith("but:"):
                hit = not any(word[4:] in alias for alias in aliases[id(one)])
            elif "\\" in word:
                hit = re.match(word, name) is not None
            else:
                hit = any(word in alias for alias in aliases[id(one)])
            if hit:
                found.add(name)
    return found


def peak(result: Estimate) -> float:
    """Bytes of tensors at the peak."""
    return max(float(moment.total) - float(moment.parts["outside"]) for moment in result.workings.phases)


def kept(result: Estimate) -> float:
    """Bytes of tensors that lie between forward and backward."""
    memory = result.workings.memory
    stage = next(iter(stages(memory.model, memory.layout)))
    held = memory.of_chunk(stage, stage.chunks[0])
    return float(held.kept + held.head + memory.embedding.saved())


def seen(run: Recorded) -> dict[str, float]:
    """Peak of a recording, and kept bytes and FLOPs of its last step."""
    most = max(itertools.accumulate(run.changes))
    return {"peak": most, "kept": sum(run.kept), "flops": sum(op.flops for op in run.ops[run.second :] if op.flops)}


def rows(kind: str, cases: dict[str, dict[str, Any]]) -> Any:
    """Each case of a type: what is trained, and captured against traced, and written against traced."""
    for name, fields in cases.items():
        config = small_config(kind, LAYERS)
        sizes = SIZES | ({"s": LONG[kind]} if kind in LONG else {})
        asked: dict[str, Any] = {
            "micro_batch": sizes["b"], "seq_len": sizes["s"], "precision": "bf16", "optimizer": "sgd", "framework": "huggingface",
        } | fields  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{kind}.json"
            file.write_text(json.dumps(config.to_dict(), default=str))
            own = loadgauge.estimate(str(file), road="captured", **asked)
            try:
                written: Estimate | None = loadgauge.estimate(str(file), road="written", **asked)
            except Error:
                written = None
        run, count = oracle(config, fields, sizes)
        truth = seen(run)
        layers = [*own.workings.memory.block_layers(), *own.workings.memory.end_layers()]
        times = [own.model.pattern.count(at) for at in range(len(own.model.blocks))] + [1, 1]
        mine = sum(
            n * weight.numel
            for n, layer in zip(times, layers, strict=True)
            for weight in layer.weights
            if weight.trainable
        )
        cells = [
            kind, name, f"{count:,}" + ("" if mine == count else f" ({mine - count:+,})"),
            share(kept(own), truth["kept"]) if "recompute" not in fields else "",
            share(own.flops.hardware, truth["flops"]), share(peak(own), truth["peak"]),
            "" if written is None else share(written.flops.hardware, truth["flops"]),
            "" if written is None else share(peak(written), truth["peak"]),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def share(one: float, two: float) -> str:
    """How far one number is from another."""
    return "equal" if one == two else f"{100 * (one / two - 1):+.3f} %"


def page(done: dict[str, list[str]], releases: str) -> str:
    """docs/captured-tuning.md."""
    lines = [row for kind in CASES for row in done.get(kind, ())]
    return f"""# Captured models trained in part

Made by `python tools/captured_tuning.py OUT.json`, with {releases}: {SIZES["b"]} sequences of {SIZES["s"]} tokens,
small models of {LAYERS} layers (defaults of the classes), SGD. The oracle is the very step of all layers on the simulated device,
with PEFT's own `get_peft_model` (rank {RANK}, `all-linear` unless it says otherwise) or with `requires_grad_(False)`; weights are
bfloat16 and adapters float32 under autocast unless the case says otherwise. Lists are captured as numbers at these sizes. Columns
are how far an estimate lies from the oracle.

| type | what is trained | parameters | kept | FLOPs | peak | FLOPs, written | peak, written |
|---|---|--:|---|---|---|---|---|
{chr(10).join(lines)}

A number in brackets is how many parameters the estimate has beside the oracle. Kept: beside what the estimate holds in numbers of
the loss. Where layers run again, PyTorch's checkpoints stop before the last product when nothing after it is kept; the estimate has
transformers' default, which runs whole layers again, and so more FLOPs.

What Mixtral's written family lacks is as large as its experts' weights: PEFT adds their adapters to weights that are one tensor,
and the sum is kept for backward.
"""


def main(path: Path, types: list[str]) -> None:
    """Compare types, all that are not done yet by default, or write the page."""
    warnings.filterwarnings("ignore")

    def in_child(work: Any, request: Any, shown: Any = None, **arguments: Any) -> Any:
        return work(request, **arguments)

    def numbers(*_: Any) -> Any:
        raise NotModelled("numbers alone: what formulas say is compared in docs/captured-accuracy.md")

    done: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if types == ["--page"]:
        versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("peft", "transformers", "torch"))
        PAGE.write_text(page(done, versions))
        return
    subprocess.in_child = in_child  # type: ignore[assignment]
    vars(list_request)["recorded"] = numbers
    for kind in types or [kind for kind in CASES if kind not in done]:
        done[kind] = []
        try:
            for line in rows(kind, CASES[kind]):
                done[kind].append(line)
                print(line, flush=True)
                path.write_text(json.dumps(done, indent=0), encoding="utf-8")
        except Exception as error:
            done[kind].append(f"| {kind} | {type(error).__name__}: {str(error)[:100]} | | | | | | |")
            print(done[kind][-1], flush=True)
        road._FAMILIES.clear()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

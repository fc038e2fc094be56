"""The formula's answer for a case, phase by phase, beside the trace."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base.errors import Error, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.hf import from_dict
from loadgauge.core.post_training.memory import memory
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.ideas.words import TORCH_OPTIMIZERS
from stack.case import Case
from stack.record import Traced

OF_PHASE = {"forward": "forward", "loss": "loss", "clip": "clip", "step": "step"}
"""The phases of the formula that are not part of the backward, by the name of the trace's."""


class Row(msgspec.Struct, frozen=True):
    """One phase, traced and by formula [bytes]; None where the formula has no answer."""

    phase: str
    traced: int
    formula: float | None

    @property
    def percent(self) -> str:
        """The formula's error."""
        return "" if self.formula is None else f"{(self.formula / self.traced - 1):+.1%}"

    @property
    def error(self) -> float | None:
        """Formula over trace, less one."""
        return None if self.formula is None else self.formula / self.traced - 1


def compare(traced: Traced) -> tuple[list[Row], str]:
    """The phases of the second step beside the formula's, and why it has none, where it has none."""
    case = traced.case
    try:
        found = of_task(case) if case.trainer in TASKS else formula(estimate(case))
        why = ""
    except Error as error:
        found, why = {}, f"{type(error).__name__}: {error}"
    seen = {"prepared": traced.prepared, **traced.phases}
    rows = [Row(name, seen[name], found.get(name)) for name in ORDER if name in seen]
    return rows, why


ORDER = ("prepared", "forward", "loss", "backward", "clip", "step", "kept")
"""The rows of a comparison: what is live before the first step, the peaks of the second, and what is live after it."""


def estimate(case: Case) -> Estimate:
    """The formula's estimate. Raises ConfigError, LayoutError or NotModelled."""
    return resolve_job(job(case), spec(case)).estimate()


@functools.cache
def spec(case: Case) -> ModelSpec:
    """The model of a case, as the formula reads its config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from stack.models import config

    written = config(case)
    return from_dict({**written.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type]]})


WEIGHTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LOSSES = {"plain": None, "chunked": "tiled", "liger": "liger", "inplace": "inplace"}
FROZEN_BESIDE = {"gpt2": "embed_positions,norm", "llama-tied": "norm", "gemma": "norm"}
"""What is trained besides layers where the table is frozen, of the families whose head is the table."""
ENDS = {"gpt2": "wte,lm_head", "gpt-neox": "embed_tokens,embed_out"}
"""Embedding and head by their names, of the families that have others."""


def precision(case: Case) -> dict[str, str]:
    """The flags of a precision: what is trained without autocast is pure."""
    loaded, plus, told = case.precision.partition("+")
    if case.wrapper.startswith("zero"):
        return {"precision": told or loaded}
    if plus:
        return {"precision": told, "weights": WEIGHTS[loaded]}
    return {"precision": "fp32" if loaded == "fp32" else f"{loaded}-pure"}


def adapters(case: Case) -> str:
    """The dtype of adapters: PEFT makes them float32, and SFTTrainer bfloat16 where the base is quantised."""
    return "bfloat16" if case.method == "qlora" and case.trains_by_trl else "float32"


def targets(case: Case) -> str:
    """The names that the script gives PEFT: of GPT-2's attention the first matrix alone, as the other is called like the MLP's."""
    return "qkv" if (case.family, case.targets) == ("gpt2", "attention") else case.targets


def job(case: Case) -> Job:
    """The flags of `loadgauge estimate` for a case. Raises NotModelled."""
    if case.wrapper.startswith("zero") and case.precision == "bf16":
        raise NotModelled(
            "16-bit weights that DeepSpeed's configuration does not name: it handles them as float32 ones"
        )
    given: dict[str, Any] = {
        **precision(case), "seq_len": case.seq_len, "micro_batch": case.micro_batch, "gpus": case.ranks,
        "global_batch": case.micro_batch * case.accumulate * case.ranks,
        "optimizer": TORCH_OPTIMIZERS[case.optimizer], "loss": LOSSES[case.loss],
        "attention": "flash" if case.attention == "sdpa" else "eager",
        "recompute": "full" if case.checkpointing in ("reentrant", "non-reentrant") else "none",
    }  # fmt: skip
    if case.checkpointing == "offloaded":
        given["activation_offload"] = "all"
    if case.method == "frozen":
        given["train"] = f"layers.{case.layers // 2}:,{FROZEN_BESIDE.get(case.family, 'norm,lm_head')}"
    if case.adapters:
        given |= {
            "lora_rank": case.rank, "lora_targets": targets(case), "lora_dropout": case.dropout or None,
            "use_dora": True if case.method == "dora" else None,
            "modules_to_save": ENDS.get(case.family, "embed_tokens,lm_head") if case.method == "embeddings" else None,
            "lora_dtype": None if case.wrapper.startswith("zero") else adapters(case),
        }  # fmt: skip
    if case.method == "qlora":
        given |= {
            "qlora": True, "base": "nf4" if case.double_quant else "nf4-single", "kbit_upcast": "all" if case.kbit else "none",
        }  # fmt: skip
    if case.loss == "inplace" and case.family == "mistral":
        given["loss"] = None  # Liger 0.8.5 replaces a name there that transformers 5 does not call
    if case.trains_by_trl:
        given["loss"] = LOSSES["chunked"]  # SFTTrainer's own, in which Liger's cross entropy is not called
    if case.wrapper.startswith("fsdp2"):
        given |= {"zero": 2 if case.wrapper == "fsdp2-zero2" else 3}
    if case.wrapper.startswith("zero"):
        given |= {"framework": "deepspeed", "zero": int(case.wrapper[4])}
    if case.bucket:
        given["engine"] = f"reduce_bucket_size={case.bucket}"
    if case.wrapper.endswith("offload"):
        given["offload"] = "optimizer" if case.wrapper == "zero2-offload" else "all"
    return Job(model="", **given)


TASKS = ("dpo", "kto", "rm", "orpo", "simpo", "cpo", "gkd", "grpo")
"""The trainers that are tasks of their own."""


NOT_LIVE = ("outside", "ends of segments", "idle segments")
"""What a trace of live bytes does not see: outside PyTorch's allocator, and what that holds idle."""


def of_task(case: Case) -> dict[str, float]:
    """The formula's bytes by the phases of a trace, of a task: the reference's pass is in that of the loss."""
    given = job(case).replace(task=case.trainer)
    if case.trainer in ("dpo", "kto"):
        given = given.replace(reference="adapter" if case.adapters else case.reference)
    if case.trainer in ("rm", "orpo", "simpo", "cpo", "gkd"):
        given = given.replace(loss=None)
    if case.trainer == "gkd":
        given = given.replace(teacher=_written(case))
    said = {
        "kto": None if case.shifted else "no-kl", "cpo": None if case.likelihood else "no-nll",
        "gkd": {0.0: "forward-kl", 1.0: "reverse-kl"}.get(case.mixture),
    }  # fmt: skip
    given = given.replace(loss_terms=said.get("cpo" if case.trainer == "simpo" else case.trainer))
    if case.trainer == "grpo":
        half = case.seq_len // 2
        given = given.replace(
            seq_len=None, prompts=case.micro_batch * case.accumulate * case.ranks, samples=1, global_batch=None,
            prompt_len=half, answers=str(case.seq_len - half), reference="none", old_logprobs="none",
        )  # fmt: skip
    run, setup = resolve_posttrain(given, spec(case))
    if case.trainer == "grpo":  # its answers are given: nothing is there but its update
        return formula(setup.estimate())
    whole = memory(run)
    beside = sum(one.nbytes for one in whole.phases[0].residents if one.role in ("reference", "teacher"))
    found = {name: nbytes + beside for name, nbytes in formula(setup.estimate()).items()}
    for phase in whole.phases:
        if phase.name in ("reference", "teacher"):
            inside = sum(one.nbytes for one in phase.residents if one.part not in NOT_LIVE)
            found["loss"] = max(found["loss"], inside)
            if case.adapters:  # then it is a pass of the same module, which the trace marks as another forward
                layers = sum(one.nbytes for one in phase.residents if one.part not in (*NOT_LIVE, "log-probs"))
                found["forward"] = max(found["forward"], layers)
    return found


@functools.cache
def _written(case: Case) -> str:
    """A file with the config of a case's model, which is its own teacher."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from stack.models import config

    made = config(case)
    place = Path(tempfile.mkdtemp()) / "config.json"
    given = {**made.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[made.model_type]]}
    place.write_text(json.dumps(given), encoding="utf-8")
    return str(place)


def formula(estimated: Estimate) -> dict[str, float]:
    """The formula's bytes by the phases of a trace, without what is outside PyTorch's allocator."""
    found: dict[str, float] = {}
    moments = estimated.memory.moments
    for moment in moments:
        if moment.phase.between_steps:
            continue
        name = OF_PHASE.get(moment.phase.value, "backward")
        nbytes = float(moment.total - moment.parts["outside"])
        found[name] = max(found.get(name, 0.0), nbytes)
    place = max(index for index, moment in enumerate(moments) if moment.phase.value == "step")
    step = moments[place].parts
    ledger = estimated.workings.ledger(place).all()
    masters = sum(entry.nbytes for entry in ledger if entry.what.startswith("float32 master weights"))
    stay = 0 if estimated.workings.ledger(place).memory.frees_gradients else step["gradients"]
    found["prepared"] = float(step["weights"] + step["gathered"] + masters + stay)
    found["kept"] = float(step["weights"] + step["gathered"] + step["optimizer"] + stay)
    found.setdefault("clip", float(sum(step[part] for part in ("weights", "gradients", "optimizer", "gathered"))))
    return found


__all__ = ["ORDER", "Row", "compare", "estimate", "formula", "job"]

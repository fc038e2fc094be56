"""`loadgauge why` on out-of-memory errors of the real libraries: does it name phase and tensor, and does its remedy fit?

`python -m stack.oom` trains each script on a simulated card that is too small in one phase, gives the traceback to `why`
with the flags of the script, changes the script as the first answer says, and trains it again on the same card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.command_line.main import commands as loadgauge
from loadgauge.pytorch.device.patches import replaced
from stack import batch
from stack.case import Case
from stack.compare import job
from stack.limit import Failure, Full, limited, printed
from stack.models import config
from stack.record import AROUND, Marks, phases, simulated
from stack.training import Rows, prepared

SIZE: dict[str, Any] = {"layers": 4, "hidden": 2048, "vocab": 32000, "seq_len": 1024, "micro_batch": 4}
NO_LIMIT = 1 << 60
LATE = 0.999
"""The share of a phase's need at which its largest moment fails."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A training script, and the phase (of `stack.record.PHASES`) for which its card is too small.

    then: what it does after the training; share: of the bytes that the phase needs more than all before it, what there is
    logits: whether an evaluation keeps the logits; joined: on the card until its end; whole: a checkpoint is gathered
    """

    case: Case
    phase: str
    then: str = ""
    share: float = LATE
    logits: bool = True
    joined: bool = True
    whole: bool = True

    @property
    def sharded(self) -> bool:
        """Whether FSDP shards the weights."""
        return self.case.wrapper.startswith("fsdp")

    @property
    def words(self) -> str:
        """The script in a line."""
        short = ",".join(word for word in self.case.words.split(",") if word.partition("=")[0] not in SIZE)
        return f"{self.phase} {self.share:g}: {short or 'full'}"


class Ran(msgspec.Struct, frozen=True):
    """A script that was trained to its end: the most live bytes before the phase, and in it."""

    before: int
    top: int


def run(script: Script, limit: int = NO_LIMIT) -> Ran | tuple[str, Failure]:
    """Trains a script in this process on a card of `limit` bytes; the phase and the error where it is too small."""
    with simulated(script.case, stacks=False) as observer:
        marks = Marks(observer)
        try:
            with limited(NO_LIMIT if script.then == "saving" else limit) as card:
                trainer = prepared(script.case, marks)
                trainer.train()
                if script.then:
                    marks(script.then, None)
                    card.limit = limit  # what is loaded whole on one card here, would be loaded on the host
                    around(script, trainer)
        except Full as error:
            last = phases(observer.stream)[-1]
            return max(last, key=lambda name: last[name][-1][1]), printed(error)
        observer.finish()
        return _needs(observer.stream, script.phase)


def around(script: Script, trainer: Any) -> None:
    """Evaluates or saves, as a script does after its training."""
    if script.then == "saving":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        get_model_state_dict(trainer.model_wrapped, options=StateDictOptions(full_state_dict=script.whole))
        return
    from transformers.trainer_pt_utils import EvalLoopContainer

    trainer.args.prediction_loss_only = not script.logits
    trainer.args.eval_accumulation_steps = None if script.joined else 1
    # What has gone to the host is not read.
    with replaced((EvalLoopContainer, "to_cpu_and_numpy", lambda self: setattr(self, "tensors", None))):
        trainer.evaluation_loop(trainer.get_eval_dataloader(Rows(script.case)), "evaluation", not script.logits)


def _needs(stream: Any, phase: str) -> Ran:
    """What a phase of the first step that has it needs more than everything before it."""
    stretches = next(step[phase] for step in phases(stream) if phase in step)
    live = [0, *itertools.accumulate(stream.changes)]
    before = live[stretches[0][0]] if phase == "saving" else max(live[: stretches[0][0] + 1])
    return Ran(before, max(live[place] for first, end in stretches for place in range(first, end + 1)))


# -- what is true of a failure -----------------------------------------------------------------------------------------

PHASES = {
    "forward": ("forward",), "loss": ("loss",), "clip": ("gradient clipping",), "step": ("optimizer step",),
    "backward": ("backward", "recomputation in the backward"), "evaluation": ("evaluation",), "saving": ("saving",),
    "load": ("loading",), "prepare": ("loading", "optimizer step"),
}  # fmt: skip
"""What `why` is to call a phase of the trace."""


def called(phase: str, failure: Failure) -> tuple[str, ...]:
    """The names of the phase of a failure: a node of the graph runs in the backward, whatever it belongs to."""
    return PHASES["backward"] if failure.backward and phase == "loss" else PHASES[phase]


def tensor(script: Script, phase: str, failure: Failure) -> str:
    """A pattern of what the tensor of a failure is called, by its operation and shape; "" where any name will do."""
    case, op = script.case, failure.op
    vocabulary = case.vocab in failure.shape
    scores = len(failure.shape) == 4 and failure.shape[-2:] == (case.seq_len, case.seq_len)
    rules: list[tuple[bool, str]] = [
        ("_foreach_sqrt" in op, "square roots"),
        (phase == "step" and "_foreach" in op, "temporary list|as large"),
        (phase == "step" and re.search(r"zeros|empty|full", op) is not None, "states"),
        (phase == "step", "temporar|copies|update"),
        (phase == "clip", "norm|copies"),
        ("all_gather" in op or "allgather" in op or "unshard" in op, "gathered"),
        ("dequantize" in op, "4 bits"),
        (scores, "attention[ .]scores|attention.softmax"),
        (vocabulary and phase in ("loss", "evaluation", "backward"), "logits|log-probabilities|head|embedding"),
    ]
    return next((pattern for holds, pattern in rules if holds), "")


# -- remedies ----------------------------------------------------------------------------------------------------------

OPTIMIZERS = {"adamw-8bit": "adamw_bnb_8bit", "adamw-fused": "adamw_torch_fused", "adafactor": "adafactor", "sgd": "sgd",
              "adamw-8bit-paged": "paged_adamw_8bit", "adamw-paged": "paged_adamw_32bit"}  # fmt: skip
OFFLOADED = {"zero2": "zero2-offload", "zero3": "zero3-offload", "fsdp2": "fsdp2-offload"}
CHANGES: dict[str, Callable[[Script, Any], dict[str, Any]]] = {
    "recompute": lambda _, value: {"checkpointing": "non-reentrant" if value == "full" else "none"},
    "attention": lambda _, value: {"attention": "sdpa"},
    "micro_batch": lambda _, value: {"micro_batch": int(value)},
    "seq_len": lambda _, value: {"seq_len": int(value)},
    "optimizer": lambda _, value: {"optimizer": OPTIMIZERS[value]},
    "loss": lambda script, _: {"trainer": "sft", "loss": "plain"} if script.sharded else {"loss": "liger"},
    "zero": lambda script, value: {"wrapper": "fsdp2" if script.sharded else ("ddp", "zero1", "zero2", "zero3")[int(value)]},
    "offload": lambda script, _: {"wrapper": OFFLOADED[script.case.wrapper]},
    "qlora": lambda _, value: {"method": "qlora"},
    "framework": lambda *_: {},
    "global_batch": lambda *_: {},
}  # fmt: skip
"""By the field of a job: the fields of a case that say the same. KeyError: the scripts here cannot do it."""


def changed(script: Script, fields: dict[str, Any]) -> Script:
    """The script with a remedy. Raises KeyError for one that is not simulated."""
    around_ = {}
    case = script.case
    for name, value in fields.items():
        if name == "eval_batches":
            around_ = {"logits": int(value) > 0, "joined": int(value) != 1}
        elif name == "save":
            around_ = {"whole": value == "full"}
        else:
            case = msgspec.structs.replace(case, **CHANGES[name](script, value))
    return msgspec.structs.replace(script, case=case, **around_)


# -- why ---------------------------------------------------------------------------------------------------------------


class Verdict(msgspec.Struct, frozen=True):
    """What `why` made of a failure. `fits`: whether its first remedy, replayed, did; None where there is none to replay."""

    script: str
    phase: str
    said: str
    tensor: str
    named: str
    phase_right: bool
    tensor_right: bool
    remedy: str
    fits: bool | None
    failure: Failure
    text: str = ""


def answer(script: Script, failure: Failure, limit: int) -> dict[str, Any]:
    """The document of `loadgauge why --json` for a failure, with the flags of the script."""
    from click.testing import CliRunner
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    flags = job(script.case)
    if script.then == "evaluation":
        flags = flags.replace(eval_batch=8, eval_batches=4 if script.logits else 0)
    if script.then == "saving":
        flags = flags.replace(save="full")
    with tempfile.TemporaryDirectory() as folder:
        error, model = os.path.join(folder, "error.txt"), os.path.join(folder, "config.json")
        with open(error, "w", encoding="utf-8") as file:
            file.write(failure.text)
        written = config(script.case)
        kind = written.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type]]}
        with open(model, "w", encoding="utf-8") as file:
            json.dump(kind, file, default=str)
        outside = estimated_outside(script.case)
        words = [
            "why",
            error,
            "--model",
            model,
            *flags.words(),
            "--memory",
            f"{(limit + outside) / 2**30:.6f}GiB",
            "--json",
        ]
        done = CliRunner().invoke(loadgauge, words)
    if done.exit_code not in (0, 1):
        raise RuntimeError(f"{' '.join(words)}: {done.output[-500:]} {done.exception!r}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def estimated_outside(case: Case) -> float:
    """What the estimate counts outside PyTorch's allocator, which the simulated card has not [bytes]."""
    from stack.compare import estimate

    return float(estimate(case).memory.moments[0].parts["outside"])


def judged(script: Script) -> Verdict:
    """A script that runs out of memory, what `why` says, and whether its remedy fits. In this process, three times."""
    needs = in_child(run, script)
    assert isinstance(needs, Ran)
    if needs.top <= needs.before:
        raise ValueError(f"{script.words}: what comes before needs more than the phase")
    limit = needs.before + int(script.share * (needs.top - needs.before))
    failed = in_child(run, script, limit)
    assert not isinstance(failed, Ran)
    phase, failure = failed
    outside = estimated_outside(script.case)
    document = answer(script, failure, limit)
    place, expected = document["place"], tensor(script, phase, failure)
    named = f"{place['tensor']} {document['place'].get('same_size') or ''}"
    fitting = [change for change in document["changes"] if change["memory"]["verdict"] in ("fits", "depends")]
    for change in fitting:
        try:
            fields = fields_of(change["flags"])
            again = changed(script, fields)
        except KeyError:
            continue
        outcome = in_child(run, again, limit)
        remedy, fits = change["flags"], isinstance(outcome, Ran)
        if not isinstance(outcome, Ran):
            remedy += (
                f" [fails again in {outcome[0]}, {outcome[1].op} {list(outcome[1].shape)} {outcome[1].dtype}; estimated"
                f" {change['memory']['total'] / 2**20:.0f} MiB with {outside / 2**20:.0f} outside, limit {limit / 2**20:.0f}]"
            )
        break
    else:
        remedy, fits = "; ".join(change["flags"] for change in fitting), None
    return Verdict(
        script=script.words, phase=phase, said=place["phase"], tensor=f"{failure.op} {list(failure.shape)} {failure.dtype}",
        named=named, phase_right=place["phase"] in called(phase, failure),
        tensor_right=bool(re.search(expected, named)), remedy=remedy, fits=fits, failure=failure,
    )  # fmt: skip


def fields_of(flags: str) -> dict[str, Any]:
    """The fields of a change from its flags."""
    found: dict[str, Any] = {}
    for part in f" {flags}".split(" --")[1:]:
        name, _, value = part.partition(" ")
        off = name.startswith("no-")
        found[name.removeprefix("no-").replace("-", "_")] = value or not off
    return found


def in_child(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own: libraries remember what was patched for a case."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            content = pickle.dumps(function(*given))
        except BaseException as error:
            content = pickle.dumps(f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
        with os.fdopen(writes, "wb") as file:
            file.write(content)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    made = pickle.loads(content)
    if isinstance(made, str):
        raise RuntimeError(made)
    return made


FEW = "loss=liger,checkpointing=non-reentrant,micro_batch=1,seq_len=64"
"""So few tokens that the states are the most."""
SCRIPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("forward", ("", "attention=eager", "attention=eager,family=qwen2,method=lora", "method=qlora",
                 "family=gpt2,attention=eager")),
    ("loss", ("", "family=gemma,method=lora,checkpointing=non-reentrant", "precision=fp32+bf16,family=qwen3",
              "method=lora,checkpointing=reentrant", "method=qlora,checkpointing=non-reentrant",
              "wrapper=fsdp2,checkpointing=non-reentrant", "family=llama-tied,wrapper=ddp,method=lora")),
    ("backward", ("loss=liger,attention=eager", "loss=liger,attention=eager,method=lora,precision=fp32+bf16",
                  "trainer=sft,checkpointing=non-reentrant,attention=eager", "loss=liger,checkpointing=reentrant",
                  "loss=liger,checkpointing=non-reentrant,method=qlora,attention=eager")),
    ("step", (f"optimizer=adamw_torch,precision=fp32,{FEW}", f"optimizer=adamw_torch,{FEW}",
              f"optimizer=adamw_torch_fused,precision=fp32+bf16,{FEW}", f"optimizer=adafactor,precision=fp32,{FEW}",
              f"optimizer=adamw_torch,wrapper=zero3,gpus=2,{FEW}", f"optimizer=adamw_bnb_8bit,precision=fp32,{FEW}",
              f"optimizer=adamw_torch,wrapper=fsdp2,precision=fp32+bf16,gpus=2,{FEW}",
              f"optimizer=lion_32bit,precision=fp32,{FEW}")),
    ("prepare", (f"optimizer=adamw_torch,wrapper=zero1,gpus=2,{FEW}", f"optimizer=adamw_torch,wrapper=zero2,gpus=2,{FEW}")),
    ("clip", ("optimizer=sgd,precision=fp32,loss=liger,micro_batch=1,seq_len=2,layers=32,hidden=64,vocab=64",)),
    ("evaluation", ("method=lora,loss=liger,checkpointing=non-reentrant,micro_batch=1",)),
    ("saving", ("wrapper=fsdp2,optimizer=sgd,precision=fp32+bf16,trainer=sft,gpus=8,layers=8,micro_batch=1,seq_len=64,"
                "checkpointing=non-reentrant",)),
)  # fmt: skip
"""By the phase in which memory runs out: what is trained."""
EARLY = 0.3
"""The share of a phase's need at which the first of its tensors fail, too."""


def scripts() -> list[Script]:
    """The scripts: each phase with several methods, optimizers and wrappers; a step and an evaluation fail early, too."""
    return [
        script(phase, words, share)
        for phase, each in SCRIPTS
        for words in each
        for share in (LATE, EARLY)[: 1 + (phase in ("step", "evaluation"))]
    ]


def script(phase: str, words: str, share: float) -> Script:
    """A script by its words, with the sizes that they do not say."""
    given = {word.partition("=")[0] for word in words.split(",")}
    case = msgspec.structs.replace(Case.of(words), **{name: size for name, size in SIZE.items() if name not in given})
    return Script(case=case, phase=phase, then=phase if phase in AROUND else "", share=share)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words that a script must have")
    parser.add_argument("--text", action="store_true", help="print the tracebacks")
    given = parser.parse_args()
    batch._import_libraries()
    wrong = 0
    for script in scripts():
        if given.only not in script.words:
            continue
        try:
            found = judged(script)
        except Exception as error:
            print(f"FAILED {script.words}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            wrong += 1
            continue
        good = found.phase_right and found.tensor_right and found.fits is not False
        wrong += not good
        print(
            f"{'ok   ' if good else 'WRONG'} {found.script}\n      {found.phase} [{found.tensor}]: {found.said}: {found.named}"
            f"\n      remedy {found.remedy}: {found.fits}",
            flush=True,
        )
        if given.text:
            print(found.failure.text)
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""Writes `docs/posttrain.md`: what `--task` answers, and how far from measured peaks its formula lies.

python -m posttrain.page
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.training.tasks import TASKS
from posttrain.minimum import verdicts
from posttrain.scores import Score, scores, summary
from posttrain.swift import rows as swift_rows
from posttrain.traces import OUT as TRACED
from stack.case import Case
from stack.compare import ORDER, of_task

OUT = Path(__file__).parents[2] / "docs" / "posttrain.md"
INTRODUCTION = """# After pre-training

Preference tuning, reward models, distillation and reinforcement learning: which phase needs the most memory, on which card, and
what to change. A task is a list of roles (models that train, score or generate) and passes; every formula is that of training or
of a forward pass. This page is written by `python -m posttrain.page`.

```sh
loadgauge estimate llama-3.1-8b --task dpo --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 4096 --recompute full
```

A pair is two sequences. The reference is a second model, a second set of adapters, the base without its adapters, computed
before, or none (`--reference`). TRL's trainers make log-probabilities in tiles since 1.16, without logits; ORPO, SimPO and CPO
still sum the gradients of slices of them. GKD compares whole distributions: at its fullest moment there are 17 tensors as large
as the logits, those of the teacher included, and 9 or 10 with one divergence (`--loss-terms forward-kl` or `reverse-kl`). Of SimPO
the chosen answers' own loss is counted (`cpo_alpha` is 1 where nothing is said); with 0 (`--loss-terms no-nll`) there is half a
gradient as large as the logits less. KTO's `apo_zero_unpaired` (`--loss-terms no-kl`) runs no pass for its KL. GKD on answers of
the student (`lmbda`) is `--task opd --loss-terms jsd --on-policy SHARE`; its prompt is taken to have what `max_length` leaves.
Under FSDP, TRL wraps the reference as one unit: its whole weights are gathered, and copied out once more.

```sh
loadgauge estimate qwen2.5-7b --task grpo --gpu h100-sxm5-80gb --gpus 8 --zero 3 --recompute full --prompts 64 --samples 8 \\
    --prompt-len 1024 --answers exp:2000,8192 --rollout vllm:tp=2,utilization=0.6,sleep=1
```

Colocated phases take turns: a card needs the largest of them, with what the others leave behind. vLLM's `utilization` is of the
card's whole memory and counts what it adds itself; SGLang's `static_fraction` is of what is free when it starts, weights and cache
alone. `--explain kv` shows the cache and how many sequences run at once, `--explain logprobs` the logits, `--explain sync` the
hand-over. Micro-batches of transformers' trainers are padded to their longest answer. Others, and `--padding free` (verl's
`use_remove_padding`), hold what their answers hold: memory is of the fullest of very many.

Engines and trainers on cards of their own, how weights reach them, and answers in several turns are words of `--placement` and
`--rollout`:

```sh
loadgauge estimate qwen2.5-7b --task grpo --gpu h100-sxm5-80gb --gpus 16 --zero 3 --recompute full --prompts 64 --samples 8 \\
    --prompt-len 1024 --answers 8192 --placement split:8+8 --staleness 1 --rollout vllm:tp=2,sync=delta
loadgauge estimate qwen2.5-7b --task grpo --gpu h100-sxm5-80gb --gpus 16 --zero 3 --recompute full --prompts 64 --samples 8 \\
    --prompt-len 1024 --answers 8192 --placement split:8+8 --rollout vllm:tp=2,turns=5,tool=2,observed=400
loadgauge estimate llama-3.1-8b --task ppo --gpu h100-sxm5-80gb --gpus 24 --zero 3 --recompute full --prompts 64 --samples 1 \\
    --prompt-len 1024 --answers 2048 --critic llama-3.1-8b --reward-model llama-3.1-8b \\
    --placement split:8+8,critic+reward=8 --rollout vllm:tp=2
```

| word | what it says |
| --- | --- |
| `split:8+8` | 8 GPUs train and 8 generate; `--staleness N`: how many updates old an answer may be |
| `split:8+8,critic+reward=8` | the critic and the reward model share 8 GPUs of their own |
| `sync=` | how weights come: `ipc`, `nccl`, `reshard` (shard to shard), `delta`, `disk`, `delta-disk` |
| `changed=`, `disk=` | the share of the weights that an update changes, and the storage's bytes a second on the way |
| `turns=5,tool=2,observed=400` | answers in 5 turns; a tool between two of them runs 2 s and returns 400 tokens |
| `sleep=1`, `suspend=` | the engine gives its memory back while the trainer works; so do communicators |

"""


def tasks() -> Iterator[str]:
    """Yield the table of tasks."""
    yield "## Tasks"
    yield ""
    yield "| `--task` | what | roles | passes of a step |"
    yield "| --- | --- | --- | --- |"
    for task in TASKS.values():
        passes = ", ".join(
            f"{one.phase}{' x 2 rows' if one.rows == 2 else f' x {one.times}' if one.times > 1 else ''}"
            for one in task.passes
        )
        yield f"| {task.name} | {task.title} | {', '.join(role.name for role in task.roles)} | {passes} |"
    yield ""


def measured() -> Iterator[str]:
    """Yield the table of measured peaks."""
    found = list(scores())
    yield "## Measured peaks"
    yield ""
    yield (
        "LoRA GRPO beside vLLM on one card, as AgileRL measured it (`tests/data/posttrain/agilerl.csv`): errors of the predicted"
        " peak. Nothing of the formula is fitted to these rows; what lies outside PyTorch, 700 MiB of an engine and the contexts of"
        " an A100 and an L4, are constants that AgileRL's own estimator has. The driver also sees segments of PyTorch's allocator"
        " that are not full: they follow from its rules (`core/post_training/segments.py`). AgileRL's states 3.18 % in the mean and"
        " 13.9 % at worst for the rollout, 4.14 % and 13.5 % for the update. Gemma 4's checkpoints hold towers of images and sounds"
        " (0.45e9 parameters) that are loaded, adapted and not in the estimate; and a lone sequence of 4,096 tokens (whose batch"
        " needs no mask) takes 3 GiB more than is predicted, as heads of 512 are then for PyTorch's plain kernel of attention."
    )
    yield ""
    yield "| model | card | rollout, mean | worst | update, mean | worst | runs |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in found:
        groups.setdefault((score.model, score.gpu), []).append(score)
    for (model, gpu), own in [*groups.items(), (("all", ""), found)]:
        cells = []
        for side in ("rollout", "update"):
            mean, worst = summary([score for score in own if score.side == side])
            cells += [f"{mean:.1%}", f"{worst:.1%}"]
        yield f"| {model} | {gpu} | {' | '.join(cells)} | {len(own) // 2} |"
    yield ""


def swift() -> Iterator[str]:
    """Yield the table of ms-swift's scripts."""
    found = list(swift_rows())
    yield "## ms-swift's scripts"
    yield ""
    text = [row for row in found if "-vl-" not in row.model]
    yield (
        "Headers of ms-swift's example scripts print whole GiB of a card (`posttrain/swift.py`), and the longest sequence that is"
        " allowed. Packed sequences fill it; others are between a few hundred tokens and it, and so is the range. Inside are"
        f" {sum(row.inside for row in found)} of {len(found)}, without models of images, whose towers are not in the estimate,"
        f" {sum(row.inside for row in text)} of {len(text)}. What is outside lies above it: packed DPO and mixtures under"
        " Megatron need 3 to 8 GiB more than is said, its packed KTO and reward model do not."
    )
    yield ""
    yield "| model | task | trainer | packed | printed | from | to |  |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | --- |"
    for row in found:
        job = parse([row.model, *shlex.split(row.flags)])
        yield (
            f"| {row.model} | {job.task}{' LoRA' if job.lora_rank else ''} | {job.framework or 'huggingface'} |"
            f" {'yes' if row.packed else ''} | {row.measured:.0f} | {row.low:.1f} | {row.high:.1f} |"
            f" {'' if row.inside else 'outside'} |"
        )
    yield ""


def minimum() -> Iterator[str]:
    """Yield the table of verl's minimum resources."""
    longest, even = list(verdicts()), list(verdicts("uniform:"))
    yield "## verl's minimum resources"
    yield ""
    yield (
        "Every row of verl's table ran (`posttrain/minimum.py`), and none may be refused. How long the answers were is not stated:"
        f" with every one at the longest that the script allows, {sum(row.right for row in longest)} of {len(longest)} are not"
        f" refused; with all lengths up to it as likely, {sum(row.right for row in even)}. verl's documentation says of its limit"
        " on answers only that none is longer. So the first reading is an upper end, and what it refuses may run; the second says"
        " no more than the limit does, and is the one to judge by. GiB of a card:"
    )
    yield ""
    yield "| model | trained | GPUs | card | all at the longest | range | verdict | any length | range | verdict |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |"
    for row, other in zip(longest, even, strict=True):
        yield f"| {row.heading()} | {row.cells()} | {other.cells()} |"
    yield ""


def traced() -> Iterator[str]:
    """Yield the table of TRL's trainers."""
    yield "## TRL's trainers on the simulated device"
    yield ""
    yield (
        "Predicted over traced bytes of each phase, less one, of small models (`python -m posttrain.traces` records them)."
        " Batches are padded, so that attention has a mask: keys and values of every head, and a mask a layer."
        " GRPO's rows are of its update, with answers that are given."
    )
    yield ""
    yield f"| case | {' | '.join(ORDER)} |"
    yield f"| --- | {' | '.join('---:' for _ in ORDER)} |"
    for words, phases in json.loads(TRACED.read_text(encoding="utf-8")).items():
        found = of_task(Case.of(words))
        cells = [f"{found[name] / phases[name] - 1:+.1%}" if name in found and name in phases else "" for name in ORDER]
        yield f"| {words.replace(',', ', ')} | {' | '.join(cells)} |"
    yield ""


def main() -> None:
    """Write the page."""
    OUT.write_text(INTRODUCTION + "\n".join([*tasks(), *measured(), *swift(), *minimum(), *traced()]), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The fields of `Job` that say what `--task` trains: its sequences, its other models, and where answers are generated."""

from typing import Annotated, get_args

import msgspec

from loadgauge.core.definitions.job.job_field import about
from loadgauge.core.definitions.serving.rollout import ROLLOUTS
from loadgauge.core.definitions.training.tasks import TASKS, Objective, Reference


class OfModel(msgspec.Struct, frozen=True):
    """Fields of a job that may be given by position."""

    model: Annotated[str, about("text", "model", "A name in the catalogue, a config.json, or another tool's job file.")]


class OfTask(OfModel, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a job about preference tuning, distillation and reinforcement learning. None: not given"""

    # fmt: off
    task: Annotated[str | None, about(
        "choice", "posttrain", "What is trained for after pre-training.", choices=tuple(TASKS))] = None
    prompts: Annotated[int | None, about(
        "whole", "posttrain", "Prompts of a step; each is answered --samples times.", low=1, high=10**7, needs="task")] = None
    samples: Annotated[int | None, about(
        "whole", "posttrain", "Answers to each prompt (GRPO's group).", low=1, high=10**5, needs="task")] = None
    prompt_len: Annotated[int | None, about(
        "whole", "posttrain", "Tokens of a prompt, with which each of its answers begins.", low=1, high=10**8, needs="task")] = None
    answers: Annotated[str | None, about(
        "text", "posttrain",
        "Tokens of the answers: N (all as long), uniform:N, exp:MEAN,MAX, lognormal:MEDIAN,SIGMA,MAX, or a file as of --lengths.",
        metavar="HOW", values=("uniform:8192", "exp:2000,8192", "lognormal:1500,0.8,8192"), needs="task")] = None
    epochs: Annotated[int | None, about(
        "whole", "posttrain", "Times that a step's answers are trained on (1).", low=1, high=10**4, needs="task")] = None
    old_logprobs: Annotated[str | None, about(
        "choice", "posttrain", "The answers' log-probs before the update: of a forward pass, or none (the engine's, the update's).",
        choices=("pass", "none"), needs="task")] = None
    logprob_batch: Annotated[int | None, about(
        "whole", "posttrain", "Sequences of one forward pass of log-probs, reference, reward and teacher (--micro-batch).",
        low=1, high=10**6, needs="task")] = None
    logprob_tokens: Annotated[int | None, about(
        "whole", "posttrain", "Tokens that such a forward pass holds at most, in place of sequences (verl's dynamic"
        " batches).", low=1, high=10**9, needs="task")] = None
    on_policy: Annotated[float | None, about(
        "positive", "posttrain", "Share of the steps in which the student generates its answers (opd; 1: in each, GKD's lmbda).",
        metavar="SHARE", needs="task")] = None
    rollout: Annotated[str | None, about(
        "text", "posttrain",
        f"Where answers are generated: {', '.join(ROLLOUTS)}, with its options (tp, pp, ep, dp, utilization, sleep, kv, ...).",
        metavar="vllm:tp=2,utilization=0.6", values=ROLLOUTS, needs="task")] = None
    placement: Annotated[str | None, about(
        "text", "posttrain",
        "colocated (trainer and rollout take turns on the same GPUs), or split:TRAINER+ROLLOUT GPUs; roles on their own after it"
        " (,reward=8,critic=4).",
        metavar="split:16+16", values=("colocated", "split:8+8"), needs="task")] = None
    staleness: Annotated[int | None, about(
        "whole", "posttrain", "Updates that an answer may be old when it is trained on (0: synchronous).", low=0, high=10**4,
        needs="task")] = None
    reference: Annotated[str | None, about(
        "choice", "posttrain", "The reference's log-probs: a second model, a second set of adapters, the base with its adapters"
        " off, computed before, or none.", choices=get_args(Reference), needs="task")] = None
    loss_terms: Annotated[str | None, about(
        "choice", "posttrain",
        "Form of the loss: kl or no-kl (kto); nll or no-nll (cpo, simpo); jsd, forward-kl or reverse-kl (gkd, opd), top-k (opd).",
        choices=get_args(Objective), needs="task")] = None
    teacher: Annotated[str | None, about("text", "posttrain", "The model that is distilled.", metavar="MODEL", needs="task")] = None
    reward_model: Annotated[str | None, about(
        "text", "posttrain",
        "A model that scores answers (none: a rule does, on the host); adapter: a second set of adapters on the actor.",
        metavar="MODEL", needs="task")] = None
    critic: Annotated[str | None, about(
        "text", "posttrain",
        "PPO's critic (a model like MODEL with a head of one column); shared: a value beside the actor's logits.",
        metavar="MODEL", needs="task")] = None
    critic_batch: Annotated[int | None, about(
        "whole", "posttrain", "Sequences of the critic's micro-batch (--micro-batch).", low=1, high=10**6, needs="task")] = None
    steps: Annotated[int | None, about(
        "whole", "posttrain", "Steps of the whole run; adds its days, and money with --price.", low=1, high=10**9,
        needs="task")] = None
    frozen_offload: Annotated[bool | None, about(
        "switch", "posttrain", "Reference, reward model and teacher are in host memory between their passes.", needs="task")] = None
    frozen_weights: Annotated[str | None, about(
        "choice", "posttrain", "Dtype in which reference, reward model and teacher are loaded (that of --weights).",
        choices=("float32", "bfloat16", "float16"), needs="task")] = None
    rollout_offload: Annotated[str | None, about(
        "choice", "posttrain", "What the trainer moves to host memory while answers are generated; states: the optimizer's,"
        " whenever no update runs; idle: all, and whenever another role has its turn.",
        choices=("none", "weights", "optimizer", "all", "states", "idle"), needs="task")] = None
    # fmt: on

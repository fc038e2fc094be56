"""verl: its PPO / GRPO trainer, whose actor's update is read here and the step around it in `verl_step`, and its SFT trainer; YAML
or Hydra's overrides."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, Unknown, names_in, row
from loadgauge.job_files.ideas.words import ATTENTION, TRANSFORMER_ENGINE
from loadgauge.job_files.pre_training.megatron import launched, recompute
from loadgauge.job_files.rollouts import verl_step

A = "actor_rollout_ref.actor."
F, M = f"{A}fsdp_config.", f"{A}megatron."
T = f"{M}override_transformer_config."


def _engine(keys: Keys) -> str:
    """`fsdp` or `megatron`."""
    strategy = keys.choice(f"{A}strategy", {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"})
    if strategy is not None:
        return str(strategy)
    inside = any(key.startswith(M) for key in keys.document.names())
    return "megatron" if inside else "fsdp"


def _layout() -> Idea:
    sizes = {
        "tp": f"{M}tensor_model_parallel_size",
        "pp": f"{M}pipeline_model_parallel_size",
        "vpp": f"{M}virtual_pipeline_model_parallel_size",
        "cp": f"{M}context_parallel_size",
        "ep": f"{M}expert_model_parallel_size",
    }
    etp, sp, distributed = f"{M}expert_tensor_parallel_size", f"{M}sequence_parallel", f"{M}use_distributed_optimizer"
    ulysses, group, reshard = f"{A}ulysses_sequence_parallel_size", f"{F}fsdp_size", f"{F}reshard_after_forward"
    policy, strategy = f"{F}offload_policy", f"{A}strategy"
    once = f"{F}use_no_sync_for_gradient_accumulation"
    megatron = (*sizes.values(), etp, sp, distributed)

    def read(keys: Keys) -> Facts:
        if _engine(keys) == "megatron":
            facts: Facts = {name: keys.whole(key) or 1 for name, key in sizes.items()}
            shared = keys.flag(sp) is not False
            stages = facts["pp"] > 1
            return facts | {
                "framework": "megatron",
                "sequence_parallel": shared and facts["tp"] > 1,
                "etp": keys.whole(etp) or (facts["tp"] if facts["ep"] > 1 else 1),
                "vpp": facts["vpp"] if stages else 1,
                "schedule": ("interleaved" if facts["vpp"] > 1 else "1f1b") if stages else None,
                "zero": 0 if keys.flag(distributed) is False else 1,
            }
        ranks = keys.whole(ulysses) or 1
        # Its configuration has gradients reduced with every micro-batch; before 0.9 there is nothing to choose.
        # param_offload and optimizer_offload move only between the updates; this is FSDP2's own offload.
        moved = "all" if keys.flag(policy) else "none"
        size = keys.whole(group, minimum=-1)
        facts = {
            "framework": "huggingface",
            "cp": ranks,
            "cp_comm": "all_to_all" if ranks > 1 else None,
            "offload": moved,
            "zero": 2 if keys.flag(reshard) is False else 3,
            "tp": 1,
            "pp": 1,
            "gradient_sync": "last" if keys.flag(once) else "each",
        }
        if size is not None and size > 0:
            # A group of the device mesh counts Ulysses' ranks among its own.
            whole, left = divmod(size, ranks)
            if left or not whole:
                raise keys.wrong(group, f"{size} cannot be split over {keys.document.shown(ulysses)} = {ranks}")
            facts["shards"] = whole
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wide = (facts.get("tp") or 1, facts.get("pp") or 1, facts.get("ep") or 1) != (1, 1, 1)
        if facts.get("framework") == "megatron" or wide:
            values: dict[str, Any] = dict.fromkeys((ulysses, group, reshard, policy, once)) | {strategy: "megatron"}
            values |= {key: facts.get(name) or 1 for name, key in sizes.items() if name != "vpp"}
            virtual, ranks = facts.get("vpp") or 1, facts.get("tp") or 1
            within = facts.get("etp") or 1
            shared = bool(facts.get("sequence_parallel"))
            return values | {
                sizes["vpp"]: virtual if virtual > 1 else None,
                sp: shared if ranks > 1 else None,
                etp: within if (facts.get("ep") or 1) > 1 or within > 1 else None,
                distributed: bool(facts.get("zero")),
            }
        ranks, moved, shards = facts.get("cp") or 1, facts.get("offload") or "none", facts.get("shards")
        if not facts.get("zero"):
            return {}
        replicated = (facts.get("replicas") or 1) > 1 or keys.has(group)
        return dict.fromkeys(megatron) | {
            strategy: keys.document.get(strategy)
            if keys.word(strategy) in ("fsdp", "fsdp2") and moved == "none"
            else "fsdp2",
            ulysses: ranks,
            policy: True if moved == "all" else False if keys.has(policy) else None,
            once: True if facts.get("gradient_sync") == "last" else False if keys.has(once) else None,
            reshard: (facts.get("zero") or 0) == 3,
            group: shards * ranks if replicated and shards is not None else None,
        }

    keys = (*megatron, ulysses, group, reshard, policy, strategy, once)
    facts = names_in("etp sequence_parallel schedule zero cp_comm offload shards framework replicas gradient_sync")
    return Idea(keys=keys, facts=(*sizes, *facts), read=read, write=write)


def _actor(keys: Keys) -> bool:
    """Return whether a file is one of PPO's or GRPO's trainer, and not of SFT's."""
    return any(key.startswith("actor_rollout_ref.") for key in keys.document.names())


def _attention() -> Idea:
    """transformers' `attn_implementation`, or Megatron's backend."""
    ours, theirs = "actor_rollout_ref.model.override_config.attn_implementation", f"{T}attention_backend"

    def read(keys: Keys) -> Facts:
        if _engine(keys) == "megatron":
            return {"attention": keys.choice(theirs, TRANSFORMER_ENGINE)}
        return {"attention": keys.choice(ours, ATTENTION)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts.get("attention") or "flash"
        megatron = facts.get("framework") == "megatron" or _engine(keys) == "megatron"
        key, words = (theirs, TRANSFORMER_ENGINE) if megatron else (ours, ATTENTION)
        named = next((word for word, kind in words.items() if kind == wanted), None)
        # verl removes padding, which PyTorch's own attention cannot: without a word it has one that can.
        return {key: None if wanted == "flash" and not keys.has(key) else named} if named else {}

    return Idea(keys=(ours, theirs), facts=("attention",), read=read, write=write)


def _batch() -> Idea:
    """Sequences of an optimizer step. The mini-batch counts prompts, each with `rollout.n` answers: verl multiplies
    (`ppo_mini_batch_size * rollout.n`, trainer/ppo/ray_trainer.py; workers/fsdp_workers.py until 0.6)."""
    mini, count, step = f"{A}ppo_mini_batch_size", verl_step.COUNT, "data.train_batch_size"
    epochs = f"{A}ppo_epochs"

    def read(keys: Keys) -> Facts:
        if not _actor(keys):
            return {"global_batch": keys.whole(step) or 256}
        samples = keys.whole(count) or 1
        facts = {"global_batch": (keys.whole(mini) or 256) * samples}
        if not verl_step.trains_answers(keys):
            return facts
        return facts | {
            "prompts": keys.whole(step) or 1024,
            "samples": samples,
            "epochs": keys.whole(epochs) or 1,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        batch, samples = facts.get("global_batch"), facts.get("samples") or keys.whole(count) or 1
        if not _actor(keys) and "prompts" not in facts:
            return {step: batch} if batch else {}
        values: dict[str, Any] = {}
        if "prompts" in facts:
            values = {step: facts["prompts"], count: samples, epochs: facts.get("epochs")}
            batch = batch or facts["prompts"] * samples
        if not batch:
            return values
        prompts, left = divmod(batch, samples)
        return values | ({mini: batch, count: 1} if left else {mini: prompts})

    return Idea(
        keys=(mini, count, step, epochs), facts=names_in("global_batch prompts samples epochs"), read=read, write=write
    )


def _micro_batch() -> Idea:
    """Sequences of a micro-batch; with a dynamic one as many as fit into a number of tokens, Ulysses' ranks together."""
    actor = (f"{A}ppo_micro_batch_size_per_gpu", f"{A}use_dynamic_bsz", f"{A}ppo_max_token_len_per_gpu")
    sft = ("data.micro_batch_size_per_gpu", "data.use_dynamic_bsz", "data.max_token_len_per_gpu")

    def read(keys: Keys) -> Facts:
        of_actor = _actor(keys)
        each, dynamic, tokens = actor if of_actor else sft
        if not (keys.flag(dynamic) if keys.has(dynamic) else not of_actor):
            return {"micro_batch": keys.whole(each) or (None if of_actor else 4)}
        most = (keys.whole(tokens) or (16_384 if of_actor else 8192)) * (
            keys.whole(f"{A}ulysses_sequence_parallel_size") or 1
        )
        length = _seq_len().read(keys)["seq_len"]
        if most < length:
            raise keys.wrong(tokens, f"{most} tokens are fewer than a sequence has ({length}), which verl refuses")
        micro, left = divmod(most, length)
        if left:
            raise Unknown(
                f"micro-batches of up to {most} tokens are no whole number of sequences of {length}",
                key=keys.document.shown(tokens),
                file=keys.file,
            )
        return {"micro_batch": micro}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        each, dynamic, _ = actor if _actor(keys) else sft
        values: dict[str, Any] = {dynamic: False} if not _actor(keys) or keys.has(dynamic) else {}
        return values | {each: facts.get("micro_batch") or 1}

    return Idea(keys=(*actor, *sft), facts=("micro_batch",), read=read, write=write)


def _loss() -> Idea:
    """How log-probabilities are made of the logits.

    With FSDP flash-attention's cross-entropy keeps the 16-bit logits and writes their gradient over them, unless the
    entropy reads them too (`inplace_backward`, workers/actor/dp_actor.py of 0.4 - 0.6, workers/engine/fsdp/transformer_impl.py of
    0.9); with fused kernels the logits are made a chunk at a time. With Megatron it is Megatron's own loss.
    """
    fused = ("actor_rollout_ref.model.use_fused_kernels", f"{A}use_fused_kernels")
    entropy = (f"{A}entropy_coeff", f"{A}calculate_entropy")

    def read(keys: Keys) -> Facts:
        if any(keys.flag(key) for key in fused):
            return {"loss": "chunked"}
        if _actor(keys) and _engine(keys) == "megatron":
            return {}
        if not _actor(keys) and not keys.since(0, 7):  # SFT's trainer had a loss of its own
            return {}
        return {"loss": "compiled" if keys.real(entropy[0]) or keys.flag(entropy[1]) else "fused"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["loss"]
        if wanted == "chunked":
            return {fused[0]: True}
        return {key: False for key in fused if keys.has(key)} if wanted in ("fused", "compiled", "auto") else {}

    return Idea(keys=fused, facts=("loss",), read=read, write=write)


def _liger() -> Idea:
    """Liger's norms and MLPs under FSDP; the loss is verl's own."""
    actor, sft = "actor_rollout_ref.model.use_liger", "model.use_liger"

    def read(keys: Keys) -> Facts:
        on = keys.flag(actor if _actor(keys) else sft) and _engine(keys) != "megatron"
        return {"kernels": "liger" if on else "native"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        key, on = actor if _actor(keys) else sft, facts.get("kernels") == "liger"
        if _engine(keys) == "megatron" and on:
            return {}
        return {key: True if on else False if keys.has(key) else None}

    return Idea(keys=(actor, sft), facts=("kernels",), read=read, write=write)


def _seq_len() -> Idea:
    prompt, answer, sft = "data.max_prompt_length", "data.max_response_length", "data.max_length"

    def read(keys: Keys) -> Facts:
        if keys.has(sft):
            return {"seq_len": keys.whole(sft)}
        first, rest = keys.whole(prompt) or 512, keys.whole(answer) or 512
        whole: Facts = {"seq_len": first + rest}
        return whole | ({"prompt_len": first, "answers": str(rest)} if verl_step.trains_answers(keys) else {})

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "prompt_len" in facts:
            # The longest is all that it says of the answers.
            longest = str(facts.get("answers") or "")
            return {prompt: facts["prompt_len"]} | ({answer: int(longest)} if longest.isdecimal() else {})
        if "seq_len" not in facts:
            return {}
        if keys.has(sft):
            return {sft: facts["seq_len"]}
        first = min(keys.whole(prompt) or 512, facts["seq_len"] // 2)
        return {prompt: first, answer: facts["seq_len"] - first} if first else {}

    return Idea(keys=(prompt, answer, sft), facts=names_in("seq_len prompt_len answers"), read=read, write=write)


def _recompute() -> Idea:
    inner = recompute(T, usual="group")
    actor, sft = "actor_rollout_ref.model.enable_gradient_checkpointing", "model.enable_gradient_checkpointing"

    def read(keys: Keys) -> Facts:
        if _engine(keys) == "megatron":
            return inner.read(keys)
        return {"recompute": "none" if keys.flag(actor if _actor(keys) else sft) is False else "full"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if _engine(keys) == "megatron":
            return inner.write(facts, keys)
        word = facts.get("recompute") or "none"
        return {actor if _actor(keys) else sft: word == "full"} if word in ("none", "full") else {}

    return Idea(keys=(actor, sft, *inner.keys), facts=("recompute",), read=read, write=write)


def _lora() -> Idea:
    rank, modules = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.target_modules"
    dtype = f"{F}model_dtype"

    def read(keys: Keys) -> Facts:
        number = keys.whole(rank, minimum=0)
        if not number:
            return {"lora_rank": 0}
        chosen = keys.words(modules) or ["all-linear"]
        facts: Facts = {"lora_rank": number, "lora_targets": "all" if chosen == ["all-linear"] else ",".join(chosen)}
        if _engine(keys) != "megatron" and keys.word(dtype) not in ("bf16", "bfloat16"):
            # What is trained is loaded in float32 before it is given adapters (`workers/engine/fsdp/transformer_impl.py`).
            facts |= {"precision": "bf16", "weights": "float32"}
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        words = facts.get("lora_targets") or "all"
        if words == "attention":
            words = "q_proj,k_proj,v_proj,o_proj"
        if not facts.get("lora_rank"):
            return {rank: 0 if keys.has(rank) else None, modules: None}
        return {rank: facts["lora_rank"], modules: "all-linear" if words == "all" else words.split(",")}

    return Idea(
        keys=(rank, modules), facts=("lora_rank", "lora_targets", "weights", "precision"), read=read, write=write
    )


VERL = Dialect(
    name="verl",
    title="verl",
    versions="verl 0.4 - 0.9",
    syntaxes=("argv", "yaml"),
    style="hydra",
    blank={
        "argv": f"python3 -m verl.trainer.main_ppo \\\n    {A}use_dynamic_bsz=False\n",
        "yaml": "actor_rollout_ref:\n  actor:\n    use_dynamic_bsz: false\n",
    },
    ideas=(
        row("model", "actor_rollout_ref.model.path", "model.path", kind="word"),
        launched("trainer.n_gpus_per_node", "trainer.nnodes", argv=False),
        _layout(),
        _batch(),
        _micro_batch(),
        _seq_len(),
        _loss(),
        _liger(),
        _recompute(),
        _lora(),
        _attention(),
        verl_step.task(),
        verl_step.engine(),
        verl_step.log_probs(),
        verl_step.moved(),
        verl_step.critic_batch(),
        row(
            "precision",
            f"{F}model_dtype",
            # Weights are sharded in float32 and gathered in 16 bits.
            words={"fp32": "bf16", "float32": "bf16", "bf16": "bf16-pure", "bfloat16": "bf16-pure"},
        ),
    ),
)

"""OLMo-core's scripts: the arguments of its configuration classes, as the calls in a program say them, with lengths in tokens.

A program is parsed and never run. Weights are float32 and sharded by FSDP2, and products run in the format that `param_dtype` says.
"""

import re

from loadgauge.job_files.ideas import SPLITS, Dialect, Facts, Idea, Keys, degree, fixed, names_in, reads, row
from loadgauge.job_files.reading.calls import Calls

SECTIONS = {
    "TransformerTrainModuleConfig": "train",
    "TransformerPipelineTrainModuleConfig": "train",
    "TransformerDataParallelConfig": "dp",
    "TransformerActivationCheckpointingConfig": "ac",
    "TransformerTensorParallelConfig": "tp",
    "TransformerExpertParallelConfig": "ep",
    "TransformerPipelineParallelConfig": "pp",
    "NumpyDataLoaderConfig": "loader",
    "ComposableDataLoaderConfig": "loader",
    "LMHeadConfig": "head",
    "Float8Config": "float8",
    **{f"TransformerContextParallelConfig.{kind}": "cp" for kind in ("zig_zag", "llama3", "ulysses")},
}
OPTIMIZERS = {
    "AdamWConfig": "adamw",
    "SkipStepAdamWConfig": "adamw",
    "LionConfig": "lion",
    "SkipStepLionConfig": "lion",
    "MuonConfig": "muon",
    "DionConfig": "muon",
}
FAMILY = re.compile(r"TransformerConfig\.([a-z]+?)(\d(?:_\d)?)_(\d+(?:_\d)?[BM]\w*)")
LOSSES = {"default": "auto", "fused_linear": "chunked", "liger": "chunked"}
BATCH = ("train.max_sequence_length", "train.rank_microbatch_size", "loader.global_batch_size")
MADE = ("ac.mode", "ac.block_interval", "ac.activation_memory_budget")


def document(text: str) -> Calls:
    """The arguments of OLMo-core's classes in a program."""
    return Calls(text, lambda name: "model" if name.startswith("TransformerConfig.") else SECTIONS.get(name), {})


def _program(keys: Keys) -> tuple[str, ...]:
    return tuple(getattr(keys.document, "program", ()))


def _model(keys: Keys) -> Facts:
    """The model of the first builder that is called, such as `TransformerConfig.olmo3_7B`."""
    match = next(filter(None, map(FAMILY.fullmatch, _program(keys))), None)
    if match is None:
        return {}
    family, version, size = match.groups()
    joint = "" if family == "qwen" else "-"
    return {"model": f"{family}{joint}{version.replace('_', '.')}-{size.replace('_v2', '').replace('_', '.')}".lower()}


def _batch(keys: Keys) -> Facts:
    """Sequences of tokens that are said for a step and for a rank's micro-batch."""
    length, micro, whole = (keys.whole(key) for key in BATCH)
    if length is None:
        return {}
    rows = {"micro_batch": micro, "global_batch": whole}
    return {"seq_len": length} | {name: max(1, tokens // length) for name, tokens in rows.items() if tokens}


def _recompute(keys: Keys) -> str:
    mode = keys.word(MADE[0]) or ("full" if "TransformerActivationCheckpointingConfig" in _program(keys) else "none")
    if mode == "selected_blocks":
        return f"full:every={keys.whole(MADE[1]) or 1}"
    if mode == "budget":
        return f"memory_budget={keys.real(MADE[2]) or 0:g}"
    if mode in ("selected_modules", "selected_ops"):
        keys.note(MADE[0], "makes the modules that are named again, where the operations that cost least are counted")
        return "per-op"
    return mode


def _zero(keys: Keys) -> Facts:
    copies, kind = keys.whole("dp.num_replicas"), keys.choice("dp.name", {"fsdp": 3, "hsdp": 3, "ddp": 0})
    return {"zero": kind, "replicas": copies, "shards": None if copies else keys.whole("dp.shard_degree")}


OLMO_CORE = Dialect(
    name="olmo-core", title="OLMo-core's scripts", versions="OLMo-core 2.0 - 2.5", syntaxes=("python",), framework="torchtitan",
    script=document,
    blank={"python": "from olmo_core.train import TrainerConfig\n\nmodel = TransformerConfig.olmo2_7B(vocab_size=100352)\n"
                     "train = TransformerTrainModuleConfig(max_sequence_length=4096)\nloader = NumpyDataLoaderConfig(seed=1)\n"
                     "dp = TransformerDataParallelConfig(reduce_dtype=DType.float32)\n"},
    ideas=(
        reads(facts="model")(_model),
        Idea(keys=BATCH, facts=names_in("seq_len micro_batch global_batch"), read=_batch, write=lambda facts, keys: {
            key: facts[name] * (1 if name == "seq_len" else facts.get("seq_len") or 4096)
            for key, name in zip(BATCH, ("seq_len", "micro_batch", "global_batch"), strict=True) if facts.get(name)}),
        reads("dp.name", "dp.num_replicas", "dp.shard_degree", facts="zero replicas shards")(_zero),
        reads(*MADE, facts="recompute")(lambda keys: {"recompute": _recompute(keys)}),
        *(degree(axis, f"{axis}.degree") for axis in (*SPLITS, "ep")),
        fixed(cp_comm=lambda keys: "all_to_all" if "TransformerContextParallelConfig.ulysses" in _program(keys) else None),
        fixed(optimizer=lambda keys: next((OPTIMIZERS[name] for name in _program(keys) if name in OPTIMIZERS), "adamw")),
        row("precision", "dp.param_dtype", words={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, default="fp32"),
        row("loss", "head.loss_implementation", words=LOSSES, default="auto", add=False),
        row("compile", "train.compile_model", words={"true": True, "false": False}, default=False, quiet=False),
    ),
)  # fmt: skip

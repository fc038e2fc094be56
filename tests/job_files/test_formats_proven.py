"""Keys without effect are proven: each list names the release whose source was read, and each key that could matter the files.

What the tools do by themselves is taken from that source; where axolotl is installed, from its own classes.
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed
from extract_keys import sections_of
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.job_files.exchange import read
from loadgauge.job_files.ideas.coverage import Coverage, key_lists, suspect

LISTS = sorted(
    each.name.removesuffix(".toml")
    for each in (resources.files("loadgauge") / "data" / "keys").iterdir()
    if each.name.endswith(".toml")
)
RECORDED = {name: sections_of(name)[0][0].partition(":")[0] for name in LISTS if name in (
    "accelerate", "automodel", "axolotl", "deepspeed", "litgpt", "llamafactory", "megatron-bridge", "ms-swift", "nemo-rl",
    "openrlhf", "peft", "prime-rl", "slime", "torchtitan", "torchtune", "transformers", "trl", "unsloth", "verl",
)}  # fmt: skip
"""The release that a dialect's keys are of."""


def groups(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    file = tomllib.loads((resources.files("loadgauge") / "data" / "keys" / f"{name}.toml").read_text(encoding="utf-8"))
    return file, file.get("harmless", [])


@pytest.mark.parametrize("name", LISTS)
def test_a_list_names_the_release_whose_source_was_read(name: str) -> None:
    file, _ = groups(name)
    assert any(character.isdigit() for character in file["proven"])
    if name in RECORDED:
        assert file["proven"] == RECORDED[name]


@pytest.mark.parametrize("name", LISTS)
def test_what_could_matter_is_proven_by_a_file(name: str) -> None:
    """A key whose name suggests memory or time stands with the files that were read, or not among those without effect."""
    for group in groups(name)[1]:
        keys = [group.get("prefix", "") + key for key in group["keys"].split()]
        if not group.get("read"):
            assert [key for key in keys if not key.endswith("*") and suspect(key)] == []
        else:
            assert "." in group["read"]


def test_a_section_known_by_its_name_covers_no_key_that_could_matter() -> None:
    lists = Coverage(harmless=frozenset({"logger.*", "saving.*"}), proven=frozenset({"saving.*"}))
    assert lists.kinds("logger.project") == lists.kinds("saving.shard_size") == ("harmless",)
    assert lists.kinds("logger.kv_dtype") == ()
    assert lists.stop("logger.kv_dtype", "fp8") is not None
    assert lists.stop("logger.kv_dtype", None) is None
    assert lists.prefixed("a.").kinds("a.saving.shard_size") == ("harmless",)


def test_prime_rls_server_hides_no_setting() -> None:
    stop = key_lists("prime-rl").stop("inference.vllm.decode_context_parallel_size", 2)
    assert stop is not None


# -- what a tool switches on by itself ---------------------------------------------------------------------------------

AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
sequence_len: 4096
micro_batch_size: 2
bf16: true
datasets: [{path: x, type: alpaca}]
"""
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
FUNCTIONS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
OFF = "".join(f"{key}: false\n" for key in FUNCTIONS)
LORA = AXOLOTL + "adapter: lora\nlora_r: 16\nlora_target_linear: true\n"


def job(text: str, version: str | None = None) -> Any:
    return read(text, file="a.yaml", version=version).job


@pytest.mark.parametrize(
    ("more", "loss"),
    [
        ("", "auto"),
        (CUT, "chunked:256"),
        (CUT + "cut_cross_entropy: true\n", "chunked:256"),
        (CUT + "cut_cross_entropy: false\n", "auto"),
    ],
)
def test_axolotls_plugin_of_the_loss_is_its_own_key(more: str, loss: str) -> None:
    """`CutCrossEntropyArgs`: `cut_cross_entropy` is true unless it is said."""
    assert job(AXOLOTL + more).loss == loss


def test_that_is_axolotls_own_default() -> None:
    """The file alone, as the package around it imports what only a machine with GPUs has."""
    package = pytest.importorskip("axolotl")
    pytest.importorskip("axolotl.utils.logging")
    place = Path(next(iter(package.__path__))) / "integrations" / "cut_cross_entropy" / "args.py"
    spec = importlib.util.spec_from_file_location("cut_cross_entropy_args", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.CutCrossEntropyArgs().cut_cross_entropy is True


def test_the_plugin_takes_the_logits_away(tmp_path: Path) -> None:
    """8,192 tokens of 128,256 words: 2 bytes of logits and 4 of their float32 copy at the least."""
    place = tmp_path / "a.yaml"
    totals = {}
    for more in (CUT, CUT + "cut_cross_entropy: false\n"):
        place.write_text(LORA + OFF + more)
        totals[more] = document(f"estimate {place} --gpu h200-sxm-141gb")["memory"]["total"]
    least, most = totals.values()
    assert most - least > 6 * 8192 * 128_256


@pytest.mark.parametrize(
    "key", ["cut_cross_entropy", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy"]
)
def test_a_key_of_a_plugin_that_is_not_listed(key: str) -> None:
    """axolotl drops it (`integrations/config.py`: only listed plugins add fields to the schema)."""
    found = read(f"{AXOLOTL}{key}: true\n", file="a.yaml")
    assert found.job == job(AXOLOTL)
    why = "does nothing in axolotl unless plugins lists axolotl.integrations"
    (item,) = (item for item in found.uncounted if item.key == key and why in item.note)
    assert not item.effect


@pytest.mark.parametrize(
    ("text", "version", "kernels"),
    [
        (AXOLOTL, None, "native"),  # no adapters
        (LORA, None, "lora"),
        (LORA.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true"), None, "lora"),
        (LORA + OFF, None, "native"),
        (LORA + OFF.replace("false", "true"), None, "lora"),
        (LORA + "load_in_8bit: true\n", None, "native"),
        (LORA + "trust_remote_code: true\n", None, "native"),
        (LORA + "trust_remote_code: true\n", "0.14", "lora"),
        (LORA + "lora_dropout: 0.05\n", None, "lora"),
        (LORA + "lora_dropout: 0.05\n", "0.15", "native"),
        (LORA, "0.8", "native"),
        (LORA + "rl: dpo\n", None, "native"),
        (LORA + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", None, "lora"),
        (LORA + "fsdp_version: 1\nfsdp_config: {reshard_after_forward: true}\n", None, "native"),
        (LORA + "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true\nliger_glu_activation: true\n",
         None, "liger-lora"),
    ],
)  # fmt: skip
def test_axolotl_runs_adapters_in_one_function_by_itself(text: str, version: str | None, kernels: str) -> None:
    """`check_auto_enable_lora_kernels`, as it is in 0.9.2, 0.14, 0.15, 0.16 and 0.19."""
    assert job(text, version).kernels == kernels


def test_that_is_axolotls_own_validator() -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlConfigWCapabilities
    data = {"adapter": "lora", "capabilities": {"n_gpu": 1}, "env_capabilities": {"torch_version": "2.9.0"}}
    found = schema.check_auto_enable_lora_kernels.__func__(schema, data)
    assert all(found[key] is True for key in FUNCTIONS)


def test_some_of_the_functions_alone_are_named() -> None:
    found = read(LORA + "lora_mlp_kernel: true\n", file="a.yaml")
    assert found.job.kernels == "native"
    assert [(item.key, item.effect) for item in found.uncounted] == [("lora_mlp_kernel", "saves")]


def test_what_the_functions_keep() -> None:
    """`LoRA_MLP` of axolotl 0.19 (`kernels/lora.py`) saves its input, gate and up, and nothing else as wide as the MLP;
    PyTorch beside them the activation's output, and the product for the last matrix's adapter."""
    wide: dict[str, list[float]] = {}
    for more in ("", OFF):
        run = resolve_job(job(LORA + more).replace(model="llama-3.1-8b"))
        tokens = run.layout.micro_batch * run.layout.seq_len
        (facts,) = run.estimate().workings.memory.facts.values()
        kept = {each.name: each for one in facts.layer.operations for each in one.keeps if each.name.startswith("mlp.")}
        wide[more] = [each.nbytes for each in kept.values() if each.numel == tokens * 14_336]
    assert sum(wide[""]) == 2 * 2 * 2 * 4096 * 14_336
    assert sum(wide[OFF]) == 2 * sum(wide[""])


def test_functions_of_adapters_are_of_gated_mlps() -> None:
    """axolotl looks for gate_proj, up_proj and down_proj, and for q_proj to o_proj; another MLP stays as PEFT runs it."""
    for name, fused in (("phi-2", False), ("llama-3.1-8b", True)):
        lora = resolve_job(Job(model=name, lora_rank=8, kernels="lora")).training.lora
        assert lora is not None
        assert lora.fused is fused
    with pytest.raises(ConfigError, match="kernels: lora are those of adapters"):
        resolve_job(Job(model="llama-3.1-8b", kernels="lora"))


# -- accelerate's configuration ----------------------------------------------------------------------------------------

SHARDED = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8,
    "num_machines": 1,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_activation_checkpointing": True},
}  # fmt: skip
SCRIPT = (
    "accelerate launch {} sft.py --model_name_or_path Qwen/Qwen3-8B --output_dir out --max_length 4096"
    " --per_device_train_batch_size 2 --bf16 true --gradient_checkpointing {}\n"
)


@pytest.mark.parametrize("name", ["fsdp.json", "fsdp.yaml"])
@pytest.mark.parametrize("beside", [True, False])
def test_the_configuration_counts_in_either_form(name: str, beside: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(SHARDED))  # which is YAML too
    place = tmp_path / "run.sh"
    place.write_text(SCRIPT.format("" if beside else f"--config_file {name}", "true"))
    with_it = f" --with {tmp_path / name}" if beside else ""
    layout = document(f"estimate {place} --gpu h100-sxm5-80gb{with_it}")["layout"]
    assert (layout["gpus"], layout["zero"]) == (8, 3)


def test_one_of_two_switches_of_recomputation_is_enough(tmp_path: Path) -> None:
    """`fsdp_plugin.activation_checkpointing` and the trainer's are looked at apart (transformers 5.23, `trainer.py`)."""
    (tmp_path / "fsdp.yaml").write_text(json.dumps(SHARDED))
    place = tmp_path / "run.sh"
    place.write_text(SCRIPT.format("--config_file fsdp.yaml", "false"))
    found = read(place.read_text(), file=str(place)).job
    assert (found.recompute, found.zero) == ("full", 3)


def test_the_trainers_autocast_goes_before_the_launchers_none(tmp_path: Path) -> None:
    """`TrainingArguments` sets ACCELERATE_MIXED_PRECISION, which the launcher's `no` had set (transformers 5.23)."""
    (tmp_path / "fsdp.yaml").write_text(json.dumps(SHARDED | {"mixed_precision": "no"}))
    place = tmp_path / "run.sh"
    place.write_text(SCRIPT.format("--config_file fsdp.yaml", "true"))
    assert read(place.read_text(), file=str(place)).job.precision == "bf16"


def test_a_configuration_from_outside_the_file_is_not_passed_over(tmp_path: Path) -> None:
    place = tmp_path / "run.sh"
    place.write_text(SCRIPT.format("--config_file $CONFIG", "true"))
    assert "only it says the ZeRO stage" in typed(f"estimate {place} --gpu h100-sxm5-80gb --strict").err
    assert [item.effect for item in read(place.read_text(), file=str(place)).uncounted if "$CONFIG" in item.note] == [
        "either"
    ]


# -- NeMo AutoModel, torchtitan and others -----------------------------------------------------------------------------

NEMO = """recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
step_scheduler: {global_batch_size: 64, local_batch_size: 1}
distributed: {strategy: fsdp2%s}
dataset: {_target_: x, seq_length: 4096}
optimizer: {_target_: torch.optim.Adam}
"""


def test_automodel_reduces_gradients_with_the_last_micro_batch(tmp_path: Path) -> None:
    """`FSDP2Config.defer_fsdp_grad_sync` is true; until then a card holds whole gradients of 8.03e9 parameters, in the
    float32 that they are reduced in (`mp_policy`); without it an eighth, in the 16 bits of the weights."""
    place, totals = tmp_path / "a.yaml", {}
    for more, when in (("", "last"), (", defer_fsdp_grad_sync: false", "each")):
        place.write_text(NEMO % more)
        assert read(place.read_text(), file="a.yaml", given={"gpus": 8}).job.gradient_sync == when
        memory = document(f"estimate {place} --gpu h100-sxm5-80gb --gpus 8")["memory"]
        totals[when] = memory["total"] - memory["parts"]["outside"]
    assert totals["last"] - totals["each"] == pytest.approx((4 - 2 / 8) * 8.03e9, rel=0.02)


def test_experts_that_automodel_leaves_gathered() -> None:
    """`enable_fsdp_optimizations` of components/moe/fsdp_mixin.py, where layers are let go after the forward."""
    text = NEMO.replace("8B}", "8B, backend: {enable_fsdp_optimizations: %s}}") % (
        "true",
        ", ep_size: 8, moe: {reshard_after_forward: true}",
    )
    found = read(text, file="a.yaml", given={"gpus": 8})
    assert (found.job.zero, [item.effect for item in found.uncounted]) == (2, ["saves"])
    assert (
        read(text.replace("optimizations: true", "optimizations: false"), file="a.yaml", given={"gpus": 8}).job.zero
        == 3
    )


def test_automodels_packs_of_vision_recipes_are_the_length() -> None:
    text = NEMO.replace("dataset:", "packed_sequence: {pack_size: 8192, max_length: 8192}\ndataset:") % ""
    assert read(text, file="a.yaml", given={"gpus": 8}).job.seq_len == 8192


@pytest.mark.parametrize(
    ("dialect", "key", "value"),
    [
        ("axolotl", "gpu_memory_limit", 20), ("axolotl", "torch_compile_mode", "max-autotune"),
        ("axolotl", "bnb_config_kwargs.bnb_4bit_compute_dtype", "float32"),
        ("transformers", "per_gpu_eval_batch_size", 64), ("transformers", "ddp_backend", "gloo"),
        ("accelerate", "fsdp_config.fsdp_auto_wrap_policy", "NO_WRAP"),
        ("transformers", "fsdp_config.auto_wrap_policy", "SIZE_BASED_WRAP"),
        ("deepspeed", "optimizer.params.torch_adam", True), ("deepspeed", "zero_optimization.memory_efficient_linear", False),
        ("deepspeed", "autotuning.enabled", True), ("deepspeed", "zero_optimization.leaf_module.classes", ["MoE"]),
        ("ms-swift", "device_map", "auto"), ("ms-swift", "ddp_backend", "gloo"),
        ("torchtune", "optimizer.amsgrad", True), ("unsloth", "model.return_logits", True),
        ("automodel", "peft.exclude_modules", ["*q_proj*"]), ("prime-rl", "trainer.max_concurrent_runs", 4),
        ("llamafactory", "galore_proj_type", "full"),
    ],
)  # fmt: skip
def test_keys_that_were_passed_over_stop_the_answer(dialect: str, key: str, value: Any) -> None:
    assert key_lists(dialect).stop(key, value) is not None


@pytest.mark.parametrize(
    ("dialect", "key", "value", "usual"),
    [
        ("axolotl", "eval_sequence_len", 8192, None), ("axolotl", "torch_empty_cache_steps", 5, -1),
        ("transformers", "torch_empty_cache_steps", 5, None), ("transformers", "skip_memory_metrics", False, True),
        ("accelerate", "fsdp_config.fsdp_limit_all_gathers", False, True),
        ("accelerate", "fsdp_config.fsdp_backward_prefetch", "NO_PREFETCH", "BACKWARD_PRE"),
        ("deepspeed", "zero_optimization.reduce_scatter", False, True), ("deepspeed", "wall_clock_breakdown", True, False),
        ("ms-swift", "loss_scale", "react", "default"), ("ms-swift", "top_entropy_quantile", 0.2, 1.0),
        ("megatron", "eval_micro_batch_size", 8, None), ("megatron", "clone_scatter_output_in_embedding", False, True),
        ("verl", "actor_rollout_ref.actor.entropy_checkpointing", True, False),
        ("nemo-rl", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer", True, False),
        ("prime-rl", "val.data.seq_len", 8192, None),
    ],
)  # fmt: skip
def test_keys_that_were_passed_over_are_named(dialect: str, key: str, value: Any, usual: Any) -> None:
    lists = key_lists(dialect)
    assert lists.bound(key, value) is not None
    assert lists.bound(key, usual) is None


def test_torchtitan_compiles_model_and_loss_or_is_not_read() -> None:
    line = "torchrun -m torchtitan.train --module llama3 --config llama3_8b --compile.enable"
    assert read(line, file="a.sh").job.compile is True
    assert read(f"{line} --compile.components model,loss", file="a.sh").job.compile is True
    part = read(f"{line} --compile.components loss", file="a.sh").uncounted
    assert {item.key: item.effect for item in part}["--compile.components"] == "costs"


def test_a_plugin_is_not_said_to_change_nothing() -> None:
    found = read(AXOLOTL + CUT, file="a.yaml")
    assert "plugins" not in found.unread
    unknown = read(AXOLOTL + "plugins: [my.own.Plugin]\n", file="a.yaml")
    assert [(item.key, item.effect, "weights" in item.parts) for item in unknown.uncounted] == [
        ("plugins", "either", True)
    ]

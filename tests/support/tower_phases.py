"""Steps of models with pictures, videos or sounds, by transformers' and PEFT's code on the simulated device, beside the answer.

`python tests/support/tower_phases.py SEED COUNT [KINDS [FILE]]` draws combinations and prints by how much each part and phase
is off; what the libraries' code needs is appended to a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

import stand_ins
from loadgauge import estimate
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import Phase, StageAtWork
from loadgauge.core.estimate.memory.rank_memory import stages
from loadgauge.core.families.encoders.pictures import cut
from loadgauge.core.families.encoders.towers import towers
from loadgauge.pytorch.capture.inputs.kinds import of_config
from loadgauge.pytorch.capture.inputs.pictures import Given, Pictures, processed
from loadgauge.pytorch.capture.symbols import values
from loadgauge.pytorch.capture.symbols.values import KeptValues, known
from loadgauge.pytorch.device.simulated import fake_tensors
from loadgauge.pytorch.record.allocations import INPUTS
from loadgauge.pytorch.record.recording import recording
from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.torch_run import TorchRun
from torch_peft import CudaBackend, in_four_bits
from tower_sizes import EXPERTS, FIXED, FREE, GRIDS

TEXT = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_hidden_layers": 3, "max_position_embeddings": 8192, "head_dim": 16, "use_cache": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
THREE = {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
DEEP = {**FREE, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({**TEXT, "sliding_window": 256}, {**FIXED, "image_size": 224, "vision_use_head": False},
               {"mm_tokens_per_image": 64}),
    "internvl": (TEXT, {**FIXED, "image_size": [112, 112], "patch_size": [14, 14]}, {}),
    "llava": (TEXT, FIXED, {}),
    "llava_next": (TEXT, FIXED, GRIDS),
    "llava_onevision": (TEXT, FIXED, GRIDS),
    "mistral3": (TEXT, {**FIXED, "head_dim": 24, "image_size": 1540}, {}),
    "llama4": ({**TEXT, **EXPERTS, "no_rope_layers": [1, 1, 0]},
               {**FIXED, "intermediate_size": 384, "projector_input_dim": 160, "projector_output_dim": 160,
                "vision_output_dim": 160},
               {}),
    "idefics3": (TEXT, FIXED, {"scale_factor": 2, "pad_token_id": 0}),
    "smolvlm": (TEXT, FIXED, {"scale_factor": 2, "pad_token_id": 0}),
    "qwen2_vl": (THREE, {"depth": 4, "embed_dim": 96, "num_heads": 4, "hidden_size": 128, "mlp_ratio": 2}, {}),
    "qwen2_5_vl": (THREE, {**FREE, "fullatt_block_indexes": [2]}, {}),
    "qwen3_vl": (THREE, DEEP, {}),
    "qwen3_vl_moe": ({**THREE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, DEEP, {}),
    "qwen3_5": ({**TEXT, **DELTA}, {**DEEP, "deepstack_visual_indexes": []}, {}),
    "glm4v": (THREE, {**FREE, "image_size": 112}, {}),
    "qwen2_audio": (TEXT, {"d_model": 96, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 256,
                           "num_mel_bins": 128}, {}),
    "voxtral": (TEXT, {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384,
                       "num_mel_bins": 128, "head_dim": 24, "num_key_value_heads": 4}, {}),
}  # fmt: skip
"""Keys of a text model, of what sees or hears, and of what is around them."""
SOUND = ("qwen2_audio", "voxtral")
TOKENS = {name: 500 + number for number, name in enumerate(("image", "audio", "video", "vision_start"))}
FREE_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
SIZES = {
    "gemma3": ["1x300x200", "3x640x480"], "internvl": ["1x112x112", "2x336x224", "1x224x112,1x112x336"],
    "llava": ["1x300x200", "3x640x480"], "llava_next": ["1x224x112", "1x100x220"], "llava_onevision": ["1x224x112", "1x100x220"],
    "mistral3": ["1x448x336", "1x448x336,1x280x280"], "llama4": ["1x112x112", "1x224x112", "1x224x224,1x112x112"],
    "idefics3": ["1x448x336", "1x100x112"], "smolvlm": ["1x448x336", "1x100x112"],
    **{kind: ["1x448x336", "2x448x336,1x280x560"] for kind in FREE_KINDS},
}  # fmt: skip
VOLUMES = {**dict.fromkeys(("qwen3_vl", "qwen3_5"), (4096, 25165824)), "glm4v": (12544, 47040000)}
"""The fewest and most pixels of a whole video, as published beside the models; their code is the same."""
VIDEOS, SECONDS, RANK = ["8x224x224", "16x280x168"], [12.3, 29.9], 8
PROJECTORS = ("multi_modal_projector", "connector", "merger", "downsample", "visual.post_layernorm")
SEEING = ("visual", "vision_tower", "vision_model", "audio_tower")
PARTS = ("params", "trained", "weights", "gradients", "states", "kept", "forward", "backward", "optimizer step")
CODES = 16 * 4 + 256 * 4 + 4
"""Bytes of the tables that turn codes into values, of a 4-bit matrix."""
How = dict[str, Any]


def draw(seed: int, count: int, kinds: list[str]) -> list[tuple[str, How]]:
    """Combinations by a seed: what is trained, in which precision, with which pictures, recomputed or not."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        kind, way = kinds[number % len(kinds)], rng.choice(["full", "lora", "lora", "qlora"])
        parts = ["frozen", "adapters"] if way == "qlora" else ["frozen", "trained", "projector"]
        how: How = {"way": way, "tower": rng.choice([*parts, "adapters"] if way == "lora" else parts)}
        autocast = "bf16-autocast" if way == "full" else "bf16-mixed-16"
        how["precision"] = autocast if way == "qlora" else rng.choice(["bf16-pure", autocast])
        how["upcast"] = rng.choice(["all", "none"]) if way == "qlora" else ""
        how |= {
            "recompute": rng.choice(["none", "none", "full"]),
            "attention": rng.choice(["flash", "flash", "flash", "eager"]),
        }
        if kind in SOUND:
            how["audio"] = rng.choice(SECONDS)
        elif kind in FREE_KINDS and kind != "qwen3_vl_moe" and rng.random() < 0.25:
            how["video"] = rng.choice(VIDEOS)
        else:
            how["pictures"] = rng.choice(SIZES[kind])
        rows.append((kind, how | {"s": rng.choice([1536, 2048])}))
    return rows


def config_of(kind: str) -> Any:
    """The config object of a small model."""
    text, tower, more = MODELS[kind]
    maker = transformers.CONFIG_MAPPING[kind]
    usual, section = maker(), "audio_config" if kind in SOUND else "vision_config"
    sections = {
        name: {**keys, "model_type": getattr(usual, name).model_type}
        for name, keys in (("text_config", text), (section, tower))
    }
    config = maker(**sections, **more)
    for name, token in TOKENS.items():
        for key in (f"{name}_token_id", f"{name}_token_index"):
            if hasattr(config, key):
                setattr(config, key, token)
    return config


def _joins(name: str) -> bool:
    return any(word in name for word in PROJECTORS)


def _sees(name: str) -> bool:
    return not _joins(name) and any(word in name for word in SEEING)


def tuned(model: Any, how: How) -> Any:
    """The model with what is trained of it: all, parts, adapters, on packed matrices or not."""
    tower, way = how["tower"], how["way"]
    if way == "full":
        for name, parameter in model.named_parameters():
            if (_sees(name) and tower != "trained") or (_joins(name) and tower == "frozen"):
                parameter.requires_grad_(False)
        return model
    linears = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and not name.endswith(("lm_head", "router"))
    ]
    adapted = [
        name
        for name in linears
        if not name.endswith(("router", "gate")) and (tower == "adapters" or not (_sees(name) or _joins(name)))
    ]
    for name in linears if way == "qlora" else ():
        layer = model.get_submodule(name)
        model.set_submodule(name, in_four_bits(layer, tuple(layer.weight.shape), "nf4", True))
    if way == "qlora":
        model.is_loaded_in_4bit, model.quantization_method = True, "bitsandbytes"
        if how["upcast"] == "all":
            peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    result = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=adapted))
    for name, parameter in model.named_parameters():
        joined = tower in ("trained", "projector") and _joins(name)
        if "lora" not in name and (joined or (tower == "trained" and _sees(name) and "embed_positions" not in name)):
            parameter.requires_grad_(True)
        if parameter.requires_grad and how["precision"] == "bf16-pure":
            parameter.data = parameter.data.to(torch.bfloat16)
    return result


def pictures_of(config: Any, how: How) -> Pictures | None:
    """What transformers' processor makes of a sequence's pictures, or of a video's frames."""
    if how.get("audio"):
        return None
    if how.get("video"):
        frames, width, height = map(int, how["video"].split("x"))
        still = processed(config, [(width, height)])
        ((_, rows, columns),) = still.given["image_grid_thw"].values
        if config.model_type in VOLUMES:
            side = 2 * config.vision_config.patch_size
            low, high = VOLUMES[config.model_type]
            sides = smart_resize(frames, height, width, factor=side, min_pixels=low, max_pixels=high)
            rows, columns = (2 * each // side for each in sides)
        times = -(-frames // config.vision_config.temporal_patch_size)
        patches = Given((times * rows * columns, still.given["pixel_values"].shape[1]), 0)
        grid = Given((1, 3), 0, [[times, rows, columns]])
        return Pictures({"pixel_values_videos": patches, "video_grid_thw": grid}, 1)
    sizes = [(w, h) for n, w, h in (map(int, word.split("x")) for word in how["pictures"].split(",")) for _ in range(n)]
    if config.model_type == "llama4":  # whose processor needs torchvision
        (tower, *_) = towers(config.to_dict(), "llama4", True)
        assert tower.rule is not None
        tiles = sum(cut(tower.rule, *size).tiles for size in sizes)
        return Pictures({"pixel_values": Given((tiles, 3, 112, 112), 0)}, len(sizes))
    return processed(config, sizes)


class Tuning(FunctionJob):
    """A step of the real code, and what it was made of."""

    def __init__(self, kind: str, how: How) -> None:
        super().__init__(self.build, f"{kind}.py:build")
        self.kind, self.how, self.seen = kind, how, dict[str, int]()
        self.config = config_of(kind)
        run = TorchRun.of(
            Job(model="", seq_len=how["s"], precision="bf16-pure", optimizer="sgd", attention=how["attention"])
        )
        self.usual = of_config(self.config, run, pictures_of(self.config, how))

    def build(self) -> Any:
        how, device = self.how, torch.empty(0, device="cuda").device
        with torch.device(device):
            model = self.usual.build(device)  # type: ignore[arg-type]
            self.seen["params"] = sum(each.numel() for each in model.parameters())
            if how["precision"] == "bf16-autocast":
                model.to(torch.float32)
            built = tuned(model.train(), how)
        if how["recompute"] == "full":
            if how["way"] != "full":
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        batch, parameters = self._inputs(device, model), [each for each in built.parameters() if each.requires_grad]
        packed = [state for each in built.parameters() if (state := getattr(each, "quant_state", None)) is not None]
        self.built, self.batch, self.matrices = built, batch, len(packed)
        self.seen["weights"] = sum(each.nbytes for each in built.parameters())
        self.seen["weights"] += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in packed)
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def step() -> None:
            with CudaBackend() if packed else contextlib.nullcontext():
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=how["precision"] != "bf16-pure"):
                    loss = built(**batch).loss
                loss.backward()
                del loss
                reached = [each for each in parameters if each.grad is not None]
                self.seen["trained"] = sum(each.numel() for each in reached)
                self.seen["gradients"] = sum(each.grad.nbytes for each in reached)
                optimizer.step()
                states = [each for state in optimizer.state.values() for each in state.values()]
                self.seen["states"] = sum(each.nbytes for each in states)
                optimizer.zero_grad(set_to_none=True)

        return step

    def _inputs(self, device: Any, model: Any) -> dict[str, Any]:
        how, more = self.how, {"n": int(16000 * self.how["audio"])} if "audio" in self.how else {}
        batch = self.usual.inputs(device, model, b=1, s=how["s"], **more)[1]
        if "video" in how:
            batch.pop("pixel_values"), batch.pop("image_grid_thw")
        for name in ("pixel_values", "pixel_values_videos", "input_features"):
            # A loop holds them in float32; Llama 4 casts nothing.
            if name in batch and not (self.kind == "llama4" and how["precision"] == "bf16-pure"):
                wide = torch.empty(batch[name].shape, device=device)
                if hasattr(batch[name], values._WHOLE):
                    values.whole(wide)
                batch[name] = wide
        if self.kind in SOUND:  # whose loss takes what it does not mask
            batch["attention_mask"] = known([[1] * how["s"]], device)
        if self.kind.startswith("qwen3_vl"):  # whose layers ask again where the pictures are
            grid = batch.get("image_grid_thw", batch.get("video_grid_thw"))
            count = sum(t * h * w for t, h, w in getattr(grid, values._VALUE).tolist()) // 4
            token = TOKENS["video" if "video" in how else "image"]
            batch["input_ids"] = batch["labels"] = known([[token] * count + [5] * (how["s"] - count)], device)
        batch["labels"] = batch["labels"].clone()
        return dict(batch)

    def introduce(self, observer: Any) -> None:
        super().introduce(observer)
        observer.name(self.built)
        observer.tracker.claim(tree_leaves(self.batch), INPUTS)


@contextlib.contextmanager
def _tensors() -> Iterator[Any]:
    most, values.MOST = values.MOST, 1 << 24
    try:
        with fake_tensors() as mode, KeptValues():
            yield mode
    finally:
        values.MOST = most


def real(kind: str, how: How) -> tuple[dict[str, float], Any]:
    """Bytes of the parts and peaks of the phases of a second step, and the config."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        for kernel, function in stand_ins.KERNELS.items():
            if hasattr(module, kernel):
                setattr(module, kernel, function)
    # Fake tensors count as traced ones, for which masks are made that real ones do without.
    vars(transformers.masking_utils)["is_tracing"] = lambda tensor=None: False
    job = Tuning(kind, how)
    with recording(job, "cuda", 2, tensors=_tensors()) as run:
        run.observer.finish()
        levels = run.stream.levels()
        phases = [*run.stream.phases, (len(levels), "")]
        first = next(number for number, (_, name) in enumerate(phases) if name == "optimizer step") + 1
        tables, result = CODES * job.matrices, dict[str, float](job.seen)
        for (start, name), (end, _) in zip(phases[first:], phases[first + 1 :], strict=False):
            highest = max(levels[max(start - 1, 0) : end]) - tables
            result[name] = max(result.get(name, 0), highest)
            if name == "backward":
                result["kept"] = levels[start - 1] - job.seen["weights"] - job.seen["states"] - tables
    return result, job.config


def ours(how: How, config: Any) -> dict[str, float]:
    """The same of the answer."""
    keys = {"seq_len": how["s"], "framework": "huggingface", "optimizer": "adamw"}
    keys |= {
        name: how.get(name) for name in ("recompute", "pictures", "video", "audio", "tower", "precision", "attention")
    }
    if how["way"] != "full":
        keys |= {"lora_rank": RANK, "lora_dtype": "bfloat16" if how["precision"] == "bf16-pure" else "float32"}
    if how["way"] == "qlora":
        keys |= {"qlora": True, "base": "nf4", "kbit_upcast": how["upcast"]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config.to_dict()))
        result = estimate(str(file), **{key: value for key, value in keys.items() if value not in (None, "")})
    memory = result.workings.memory
    stage = next(iter(stages(memory.model, memory.layout)))
    moments, work = result.workings.phases, StageAtWork(memory, stage)

    def total(moment: Any) -> float:
        return float(moment.total - moment.parts["outside"])

    def most(*phases: Phase) -> float:
        return max(total(moment) for moment in moments if moment.phase in phases)

    (head,) = (moment for moment in moments if moment.phase is Phase.LOSS)
    forming, back = float(memory.head_forming), float(memory.head_backward)
    ahead = behind = float(head.parts["gathered"])
    if memory.head_apart:
        ahead, behind = (float(work.gathered(work.point(name))) for name in ("head", "loss"))
        chosen = forming if ahead + forming > behind + back else back
    else:
        chosen = float(memory.head_working)
    base = total(head) - float(head.parts["gathered"]) - chosen
    (step,) = (moment for moment in moments if moment.phase is Phase.STEP)
    states = {name: float(step.parts[name]) for name in ("weights", "gradients", "optimizer")}
    fixed = sum(float(head.parts[name]) for name in ("weights", "gradients", "optimizer"))
    return {
        "params": float(result.params), "trained": float(memory.weighed(stage)[1].all.trainable),
        "weights": states["weights"], "gradients": states["gradients"], "states": states["optimizer"],
        "kept": base + behind - fixed + float(memory.head_kept),
        "forward": max(most(Phase.FORWARD), base + ahead + forming),
        "backward": max(most(Phase.BACKWARD, Phase.EMBEDDING), base + behind + back), "optimizer step": total(step),
    }  # fmt: skip


def compare(kind: str, how: How) -> dict[str, float]:
    """By how much the answer is off, by part and phase; a share of the real bytes."""
    theirs, config = real(kind, how)
    mine = ours(how, config)
    return {part: mine[part] / theirs[part] - 1 for part in PARTS}


def words(kind: str, how: How) -> str:
    """A combination on a line."""
    return f"{kind} {' '.join(str(value) for value in how.values() if value)}"


def read(file: Path) -> list[tuple[str, How, dict[str, float]]]:
    """The rows of a table: a combination, and the bytes of its parts and phases by the libraries' code."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def main(seed: int, count: int, kinds: list[str], file: Path | None = None) -> None:
    """Print a line for each combination, and append to a file what it measures."""
    good = ran = 0
    for number, (kind, how) in enumerate(draw(seed, count, kinds)):
        label = f"{number:3} {words(kind, how)}"
        try:
            theirs, config = real(kind, how)
            mine = ours(how, config)
            off = {part: mine[part] / theirs[part] - 1 for part in PARTS}
        except Exception as error:  # the next one is another model
            print(f"ERR {label}: {type(error).__name__}: {str(error)[:160]}", flush=True)
            continue
        if file is not None:
            with file.open("a") as table:
                table.write(json.dumps([kind, how, {part: int(theirs[part]) for part in PARTS}]) + "\n")
        ran, good = ran + 1, good + all(abs(share) <= 0.01 for share in off.values())
        shown = " ".join(f"{part} {100 * share:+.2f}" for part, share in off.items() if abs(share) > 0.002)
        print(f"{'BAD' if any(abs(share) > 0.01 for share in off.values()) else 'ok '} {label} | {shown}", flush=True)
    print(f"{good} of {ran} within 1 % at every phase")


if __name__ == "__main__":
    given = sys.argv[3].split(",") if len(sys.argv) > 3 and sys.argv[3] else list(MODELS)
    main(int(sys.argv[1]), int(sys.argv[2]), given, Path(sys.argv[4]) if len(sys.argv) > 4 else None)

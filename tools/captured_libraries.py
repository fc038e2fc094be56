"""Compare captured formulas of models of diffusers, timm and torchvision with a trace of the very step at sizes never captured.

python tools/captured_libraries.py out.json [names ...]     results so far, each in a process of its own

python tools/captured_libraries.py out.json page           docs/captured-libraries.md of them

Needs diffusers, timm and torchvision. Parameters of whole published configs are compared with the class on the meta device.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from captured_accuracy import compared

LIMIT = 240
"""Seconds of CPU that a model may take."""
FIRST = {"b": 3, "h": 24, "w": 32, "s": 24, "f": 3, "n": 7000, "t": 20}
OTHERS = (
    {"b": 5, "h": 32, "w": 40, "s": 40, "f": 5, "n": 9000, "t": 33},
    {"b": 1, "h": 40, "w": 24, "s": 33, "f": 4, "n": 8000, "t": 9},
)
"""Where formulas are captured, and where they are asked; sides and frames are multiples of what a model wants."""

ALONE: dict[str, dict[str, int | str]] = {"DiTTransformer2DModel": {"w": "h"}, "CogVideoXTransformer3DModel": {"s": 24}}
"""Sizes that a model's own code ties to another (pictures are squares) or to its config (the text's length)."""

_TINY = {"num_attention_heads": 2, "attention_head_dim": 16}
_LEVELS = {"block_out_channels": [16, 32], "norm_num_groups": 8, "layers_per_block": 1}
_CROSS = {
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 24, "attention_head_dim": 8,
}  # fmt: skip
LIBRARIES: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        **_LEVELS,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    },
    "UNet2DConditionModel": {**_LEVELS, **_CROSS},
    "UNet2DConditionModel, SDXL": {
        **_LEVELS, **_CROSS, "_class_name": "UNet2DConditionModel", "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 1280 + 48, "transformer_layers_per_block": [1, 2],
    },
    "AutoencoderKL": {
        **_LEVELS, "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2, "latent_channels": 4,
    },
    "DiTTransformer2DModel": {**_TINY, "num_layers": 2, "sample_size": 32, "norm_num_groups": 4},
    "PixArtTransformer2DModel": {
        **_TINY, "num_layers": 2, "sample_size": 32, "caption_channels": 24, "cross_attention_dim": 32, "norm_num_groups": 4,
    },
    "SD3Transformer2DModel": {
        **_TINY, "num_layers": 2, "sample_size": 64, "pos_embed_max_size": 48, "joint_attention_dim": 24,
        "caption_projection_dim": 32, "pooled_projection_dim": 40,
    },
    "FluxTransformer2DModel": {
        **_TINY, "num_layers": 2, "num_single_layers": 2, "in_channels": 16, "joint_attention_dim": 24, "pooled_projection_dim": 40,
        "axes_dims_rope": [4, 6, 6], "guidance_embeds": True,
    },
    "SanaTransformer2DModel": {
        **_TINY, "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
        "caption_channels": 24, "sample_size": 32,
    },
    "WanTransformer3DModel": {**_TINY, "num_layers": 2, "text_dim": 24, "freq_dim": 32, "ffn_dim": 64},
    "CogVideoXTransformer3DModel": {
        **_TINY, "num_layers": 2, "text_embed_dim": 24, "time_embed_dim": 32, "sample_width": 32, "sample_height": 24,
        "sample_frames": 9, "max_text_seq_length": 24,
    },
}  # fmt: skip
NAMED = (
    "timm:resnet18 timm:vit_tiny_patch16_224 timm:convnext_atto timm:swin_tiny_patch4_window7_224 timm:efficientnet_b0 "
    "timm:mobilenetv3_small_100 torchvision:resnet18 torchvision:vit_b_16 torchvision:swin_t torchvision:convnext_tiny "
    "torchvision:efficientnet_b0 torchvision:vgg11 torchvision:mobilenet_v3_small torchvision:deeplabv3_resnet50 "
    "torchvision:fcn_resnet50 torchvision:r3d_18"
)
SQUARE = {"b": 3, "h": 224, "w": 224, "f": 8}
SQUARES = ({"b": 5, "h": 224, "w": 224, "f": 12}, {"b": 1, "h": 224, "w": 224, "f": 16})
PUBLISHED = {
    "flux.1-dev": "12 B, its model card", "sd3-medium": "2 B, arXiv 2403.03206", "wan2.1-t2v-14b": "14 B, its model card",
    "sana-1.6b": "1.6 B, arXiv 2410.10629", "dit-xl-2": "675 M, arXiv 2212.09748", "pixart-alpha": "0.6 B, arXiv 2310.00426",
    "sdxl": "2.6 B, arXiv 2307.01952", "cogvideox-2b": "2 B, arXiv 2408.06072",
}  # fmt: skip
"""Named configs (`data/capture/libraries.toml`), and what their owners publish."""


def tried(name: str) -> dict[str, Any]:
    """What comparing one model comes to: a row for each size."""
    import torch

    from loadgauge.core.base.errors import ConfigError, first_line
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.capture.capture import Captures
    from loadgauge.pytorch.capture.inputs.libraries import of_keys
    from loadgauge.pytorch.capture.inputs.target import config_keys
    from loadgauge.pytorch.capture.record import record
    from loadgauge.pytorch.trace.torch_run import TorchRun

    if name in detectors():
        from captured_detection import compared as against_its_step

        return {"detection": against_its_step(name.partition(":")[2])}
    torch.set_num_threads(1)
    begun = time.process_time()
    rows: list[dict[str, Any]] = []
    own = name in LIBRARIES
    keys = {"_class_name": name, **LIBRARIES[name]} if own else config_keys(name)
    job = of_keys(keys, name, TorchRun.of(Job(model="", seq_len=1, precision="fp32", optimizer="sgd")))
    first, *others = (tied(sizes, name) for sizes in ((FIRST, *OTHERS) if own else (SQUARE, *SQUARES)))
    captures = Captures(job, name)
    try:
        found = captures.at(**{size: first[size] for size in job.names})
    except ConfigError as error:
        return {"refused": first_line(error)[:200]}
    for asked in others:
        sizes = {size: asked[size] for size in job.names}
        try:
            plain = record(job, sizes)
        except Exception as error:  # the code itself refuses the sizes
            rows.append({"sizes": sizes, "refused": first_line(error)[:120]})
            continue
        known = len(captures.known)
        there = captures.at(**sizes)
        row: dict[str, Any] = compared(there, plain, sizes)
        rows.append({"sizes": sizes, "again": len(captures.known) > known, **row})
    kept = "" if found.plain else str(found.kept_formula)
    return {
        "rows": rows, "kept": kept, "plain": found.plain, "guards": len(found.guards),
        "seconds": round(time.process_time() - begun, 1),
        "branches": [one.rpartition("/")[2] for one in found.branches],
    }  # fmt: skip


def detectors() -> tuple[str, ...]:
    """Detection networks, which are compared with a step on the CPU (`captured_detection`)."""
    from captured_detection import MODELS

    return tuple(f"torchvision:{name}" for name in MODELS)


def tied(sizes: dict[str, int], name: str) -> dict[str, int]:
    """Sizes, with those that a model ties to others."""
    return sizes | {key: sizes[to] if isinstance(to, str) else to for key, to in ALONE.get(name, {}).items()}


def published() -> dict[str, dict[str, Any]]:
    """Parameters of whole published configs, as a capture has them and as the class has them on the meta device."""
    import torch

    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.capture.inputs.libraries import library_keys, of_keys
    from loadgauge.pytorch.trace.torch_run import TorchRun

    found = {}
    for name, said in PUBLISHED.items():
        keys = library_keys(f"diffusers:{name}")
        job = of_keys(keys, name, TorchRun.of(Job(model="", seq_len=1, precision="bf16-pure", optimizer="sgd")))
        mine = sum(one.numel() for one in job.build("meta").parameters())
        kind = getattr(importlib.import_module("diffusers"), keys["_class_name"])
        with torch.device("meta"):
            theirs = kind(**{key: value for key, value in keys.items() if key not in ("_class_name", "library")})
        found[name] = {"parameters": mine, "class": sum(one.numel() for one in theirs.parameters()), "published": said}
    return found


def forked(name: str) -> dict[str, Any]:
    """`tried` in a child process with a limit."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + LIMIT,) * 2)
        try:
            out = tried(name)
        except BaseException as error:
            at = [f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)]
            out = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}", "at": at[-2:]}
        with os.fdopen(write, "w") as file:
            json.dump(out, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"more than {LIMIT} seconds of CPU"}


def page(done: dict[str, Any]) -> str:
    """The page of results: of each model the largest difference, and whether formulas were found."""
    lines = [
        "# Models of diffusers, timm and torchvision, captured",
        "",
        "Small models captured at one size, then compared with a plain run of the very step at two others, one of one sample:",
        "live bytes at every event, bytes kept for backward and FLOPs, as the largest relative difference of all. Where the",
        "guards of formulas do not hold, they are captured again, as for a user. Where there are none, the answer is a plain run",
        "at the sizes asked for, which must agree, and the reason is given. float32 and SGD;",
        "`python tools/captured_libraries.py` writes this page.",
        "",
        "| model | difference | answer |",
        "|---|--:|---|",
    ]
    for name, one in done.items():
        if name == "published" or "detection" in one:
            continue
        rows = [row for row in one.get("rows", ()) if "refused" not in row]
        worst = max((row[key] for row in rows for key in ("live", "kept", "flops")), default=None)
        stopped = one.get("refused") or one.get("error")
        if stopped or worst is None:
            lines.append(f"| {name} | | {(stopped or 'refused').splitlines()[0][:120].replace('|', '/')} |")
        else:
            why = one["plain"].partition("(")[0].strip()[:90].replace("|", "/")
            lines.append(f"| {name} | {worst:.2%} | {'formulas' if not one['plain'] else f'numbers: {why}'} |")
    return "\n".join([*lines, *detection(done)]) + "\n"


def detection(done: dict[str, Any]) -> list[str]:
    """Lines on detection networks: of each what the capture and the step on the CPU have."""
    found = {name: one["detection"] for name, one in done.items() if "detection" in one}
    lines = [
        "",
        "## Detection networks of torchvision",
        "",
        "Each against one forward and backward of the real model on the CPU (`tools/captured_detection.py`): two random pictures",
        "of 800 x 800, eight random objects in each, initial weights. The rows that data chose in that step were read off it and",
        "stated (`--rows`). Parameters are also those published (`num_params` of the weights). Kept bytes are what autograd's",
        "hooks on saved tensors see. Operations are compared in order, by name and by the bytes of each new tensor, without",
        "copies between host and device. The last two columns: how much more the answer without `--rows` has, with as many rows",
        "as there can be.",
        "",
        "| model | parameters | FLOPs | kept bytes | operations alike | most: FLOPs | most: peak |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, one in found.items():
        cells = [_both(one[what]) for what in ("parameters", "flops", "kept")]
        alike, run = one["operations"]["alike"], one["operations"]["run"]
        more = [one["most"][0] / one["flops"][0] - 1, one["peak"][1] / one["peak"][0] - 1]
        shown = [*cells, f"{alike:,} of {run:,}", *(f"+ {share:.1%}" for share in more)]
        lines.append(f"| {name.partition(':')[2]} | {' | '.join(shown)} |")
    others = {key.split("[")[0] for one in found.values() for key in one["operations"]["others"]}
    words = [NOT_ALIKE.get(key, f"`{key}`") for key in sorted(others)]
    return [*lines, "", f"Not alike: {'; '.join(words)}."] if found else []


NOT_ALIKE = {
    "copy_ | fill_": "a number that is written into part of a tensor, which a capture copies",
    "smooth_l1_loss": "`smooth_l1_loss`, whose sum holds what it adds up until it is freed (less than 0.1 MB here)",
    "sort": "non-maximum suppression, which a capture writes out as CUDA's kernel has it",
}


def _both(pair: list[int]) -> str:
    """A number where the capture and the step have the same, else both."""
    return f"{pair[0]:,}" if len(set(pair)) == 1 else " / ".join(f"{one:,}" for one in pair)


def main(place: str, *names: str) -> None:
    """Fill the file of results, or write the page of them."""
    file = Path(place)
    done = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if names == ("page",):
        Path(__file__).parents[1].joinpath("docs", "captured-libraries.md").write_text(page(done))
        return
    if "published" not in done or names == ("published",):
        done["published"] = published()
    for name in names or (*LIBRARIES, *NAMED.split(), *detectors()):
        if name in done and not names:
            continue
        done[name] = forked(name)
        print(name, json.dumps(done[name])[:300], flush=True)
        file.write_text(json.dumps(done, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

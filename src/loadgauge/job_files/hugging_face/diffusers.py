"""diffusers' own training programs (`train_*.py`) and finetrainers: command lines, with what each program takes for granted.

Defaults are those of the programs (`data/diffusion.toml`); one that is none of them, and is named so, is read as the nearest.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from loadgauge.core.base import provider, read_table
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.job_files.hugging_face.huggingface import compiled, dropout, processes
from loadgauge.job_files.ideas import MISSING, Dialect, Facts, Idea, Keys, dora, fixed, names_in, reads, row
from loadgauge.job_files.pre_training.megatron import launched
from loadgauge.job_files.reading.known_files import beside

PROGRAM = re.compile(r"\btrain_(\w+)\.py\b")
NAME, SIDE, LENGTH = "pretrained_model_name_or_path", "resolution", "max_sequence_length"
RANKS, QUANTISED = ("rank", "lora_rank"), "bnb_quantization_config_path"
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "bf16"}
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
STAYING = {(True, True): "all", (True, False): "vae", (False, True): "texts", (False, False): "cached"}
"""`--encoders`, by whether the VAE and the encoders of texts stay on the card."""
OTHERWISE = {"advanced", "miniature", "img2img", "wds", "sd15"}
"""Words of programs' names that say no other model."""
STAYS = names_in("caption_column pre_compute_text_embeddings cache_latents offload")
VIDEO = names_in("max_num_frames width height")


def named(keys: Keys, name: str, usual: str, program: str) -> str | None:
    """Return a model's name, or the one that a program is for where the name is not known; None where it is for none.

    >>> from loadgauge.job_files.reading.nested import json_document
    >>> keys = Keys(json_document("{}"))
    >>> named(keys, "black-forest-labs/FLUX.1-dev", "sdxl", ""), named(keys, "me/my-own", "sdxl", "train_x.py")
    ('black-forest-labs/FLUX.1-dev', 'sdxl')
    """
    if name and (name.endswith(".json") or getattr(provider("MODEL_SOURCES"), "of_library", bool)(name)):
        return name
    keys.remark(
        f"its model{f' {name}' if name else ''} is taken for {usual}, which {program} is for",
        when="model" not in keys.given and usual,
    )
    return usual or None


def stated(keys: Keys, key: str) -> str:
    """The value of a key as text, empty where it comes from outside the file."""
    value = keys.raw(key)
    return value if isinstance(value, str) and "$" not in value else ""


def table(name: str) -> dict[str, Any]:
    """Return a table of what trainers of diffusion models take for granted."""
    tables: dict[str, dict[str, Any]] = read_table("diffusion.toml")
    return tables[name]


def _program(keys: Keys) -> tuple[str, dict[str, Any], bool]:
    """The name of the program after `train_`, the row of the nearest, all whose words are in it, and whether it is that one.

    Where there is none, Stable Diffusion's row, with adapters or not.
    """
    name = next(iter(PROGRAM.findall(keys.program)), "")
    words, rows = set(name.split("_")), table("diffusers")
    fits = [row for row in rows if set(row.split("_")) <= words]
    lora = "_lora" if "lora" in words or keys.has(*RANKS) else ""
    nearest = max(fits, key=len, default=f"text_to_image{lora}")
    return name, rows[nearest], words - OTHERWISE == set(nearest.split("_"))


def _own(keys: Keys) -> dict[str, Any]:
    return _program(keys)[1]


def _model(keys: Keys) -> Facts:
    """The model and the tokens of its texts; one of a program that no row is for is asked for."""
    name, own, exact = _program(keys)
    if "beside" in own:
        rule = table("beside")[own["beside"]]
        parts, note = tuple(rule["parts"].split()), f"train_{name}.py: {rule['why']}"
        keys.add(Uncounted(note, name, effect=rule["effect"], parts=parts, share=rule["share"]))
    longest, clip = own.get("text", (0, 0))
    texts = {"inputs": f"s={(keys.whole(LENGTH) or longest) + clip}"} if longest else {}
    return {"model": named(keys, stated(keys, NAME), own["model"] if exact else "", f"train_{name}.py")} | texts


@reads(SIDE, "aspect_ratio_buckets", "cond_image_column", *VIDEO, facts="pictures video")
def _pictures(keys: Keys) -> Facts:
    """Sizes of the pictures; of several (`--aspect_ratio_buckets`) the largest."""
    own = _own(keys)
    if "video" in own:
        sizes = (str(keys.whole(key) or usual) for key, usual in zip(VIDEO, own["video"], strict=True))
        return {"video": "x".join(sizes)}
    height = width = keys.whole(SIDE) or own["side"]
    if buckets := re.findall(r"(\d{2,5}),(\d{2,5})", stated(keys, "aspect_ratio_buckets")):
        height, width = max(((int(a), int(b)) for a, b in buckets), key=math.prod)
    # The tokens of a picture that is changed stand behind those of what it becomes.
    doubled = own.get("twice") == "doubled" and keys.has("cond_image_column")
    return {"pictures": f"1x{width}x{height * (2 if doubled else 1)}"}


@reads(
    "train_batch_size",
    "with_prior_preservation",
    facts="micro_batch",
    write=lambda facts, keys: {"train_batch_size": facts.get("micro_batch"), "with_prior_preservation": None},
)
def _batch(keys: Keys) -> Facts:
    """Pictures of a micro-batch, beside each of which prior preservation has another."""
    each = keys.whole("train_batch_size") or _own(keys)["batch"]
    return {"micro_batch": each * (2 if keys.flag("with_prior_preservation") else 1)}


def _adapters(keys: Keys) -> Facts:
    rank = keys.agreed(RANKS, keys.whole) or _own(keys).get("rank", 0)
    return {
        "lora_rank": rank if "rank" in _own(keys) or keys.has(*RANKS) else 0,
        "lora_targets": keys.joined("lora_layers"),
    }


def _precision(keys: Keys) -> Facts:
    """The precision: float32 under autocast for weights that are trained; frozen ones are in the format of the products."""
    word = keys.choice("mixed_precision", PRECISIONS)
    frozen = bool(_adapters(keys)["lora_rank"])
    return {"precision": word or "fp32", "weights": HALVES.get(word or "") if frozen else "float32"}


def _staying(keys: Keys) -> str:
    own = _own(keys)["stay"]
    texts = own in ("all", "texts") or (own == "told" and keys.has("caption_column"))
    vae = own in ("all", "told", "vae") and not (keys.flag("cache_latents") or keys.flag("offload"))
    return STAYING[vae, texts and not keys.flag("pre_compute_text_embeddings")]


@reads(QUANTISED, facts="qlora base kbit_upcast")
def _quantised(keys: Keys) -> Facts:
    """The format of a frozen base by the file that says it; one that is not there can only save."""
    try:
        read = json.loads(beside(stated(keys, QUANTISED), keys) or "{}")
    except ValueError as error:
        raise keys.wrong(QUANTISED, f"is no JSON: {error}") from None
    if not (isinstance(read, dict) and read.get("load_in_4bit")):
        keys.note(
            QUANTISED,
            "quantises the frozen weights in a way that is not read",
            "saves",
            "weights",
            0.75,
            when=keys.has(QUANTISED),
        )
        return {}
    kind = "fp4" if read.get("bnb_4bit_quant_type", "fp4") == "fp4" else "nf4"
    single = "-single" if kind == "nf4" and not read.get("bnb_4bit_use_double_quant") else ""
    return {"qlora": True, "base": f"{kind}{single}", "kbit_upcast": "all"}


def optimizer(keys: Keys, name: str, key: str = "optimizer") -> str:
    """The optimizer of a word in lower case; one that is not read is noted, and AdamW counted."""
    words: dict[str, str] = table("optimizers")
    keys.note(
        key,
        "keeps other states than AdamW's two, which are counted",
        parts="optimizer",
        share=1.0,
        when=name not in words,
    )
    return words.get(name, "adamw")


def _optimizer(keys: Keys) -> str:
    name = "adafactor" if keys.flag("use_adafactor") else (keys.word("optimizer") or "adamw").lower()
    return optimizer(keys, "adamw8bit" if keys.flag("use_8bit_adam") and name in ("adam", "adamw") else name)


CHECKPOINTS = row(
    "recompute", "gradient_checkpointing", words={"true": "full", "false": "none"}, default="none", off="none"
)
ACCUMULATION = row("accumulation", "gradient_accumulation_steps", default=1)
DIFFUSERS = Dialect(
    name="diffusers",
    title="diffusers' training programs",
    versions="diffusers 0.30 - 0.42",
    syntaxes=("argv",),
    style="flags",
    blank={"argv": "accelerate launch train_text_to_image.py --output_dir out\n"},
    ideas=(
        launched(),
        processes(),
        Idea(
            keys=(NAME, LENGTH),
            facts=("model", "inputs"),
            read=_model,
            write=lambda facts, keys: {NAME: facts.get("model") or None},
        ),
        _pictures,
        _batch,
        ACCUMULATION,
        CHECKPOINTS,
        Idea(
            keys=("mixed_precision",),
            facts=("precision", "weights"),
            read=_precision,
            write=lambda facts, keys: {"mixed_precision": {"fp32": "no"}.get(facts["precision"], facts["precision"])},
        ),
        Idea(
            keys=(*RANKS, "lora_layers"),
            facts=("lora_rank", "lora_targets"),
            read=_adapters,
            write=lambda facts, keys: {
                "rank": facts.get("lora_rank") or None,
                "lora_layers": facts.get("lora_targets"),
            },
        ),
        _quantised,
        dropout("lora_dropout"),
        dora("use_dora"),
        fixed(*STAYS, encoders=_staying),
        fixed("optimizer", "use_8bit_adam", "use_adafactor", optimizer=_optimizer),
    ),
)

BUCKETS = re.compile(r'"(image|video)_resolution_buckets"\s*:\s*(\[\s*\[[\d\s,\[\]]*\]\s*\])')


def _trained(keys: Keys) -> Facts:
    """Weights in the format that they are loaded in; adapters in float32 unless they are sharded."""
    lora, sharded = "lora" in (keys.word("training_type") or "lora"), (keys.whole("dp_shards") or 1) > 1
    keys.note(
        "training_type",
        "has the latents of a control beside those of the picture",
        "costs",
        "activations",
        0.05,
        when=(keys.word("training_type") or "").startswith("control"),
    )
    chosen = keys.words("target_modules") or [
        "(transformer_blocks|single_transformer_blocks).*(to_q|to_k|to_v|to_out.0)"
    ]
    adapted = {
        "lora_rank": keys.whole("rank") or 64,
        "lora_targets": ",".join(chosen),
        "lora_dtype": "bfloat16" if sharded else "float32",
    }
    return {"precision": "bf16-pure", **(adapted if lora else {"lora_rank": 0})}


def sized(frames: int, height: int, width: int) -> Facts:
    """The sizes of pictures, or of a video, as facts. ``sized(1, 512, 768) == {"pictures": "1x768x512"}``"""
    return {"video" if frames > 1 else "pictures": f"{frames}x{width}x{height}"}


def of_data(
    keys: Keys, key: str, read: Callable[[str], Facts], usual: str = "those of the model's publication"
) -> Facts:
    """The sizes that a file of data says, by `read`; none where it is not there, and `usual` is noted. Raises `ConfigError`."""
    text = beside(stated(keys, key), keys)
    if text is None:
        keys.note(
            key,
            f"is not there, and it says the sizes of pictures: {usual} are counted (--pictures, --video)",
            parts="activations transient",
            share=1.0,
        )
        return {}
    try:
        return read(text)
    except (ValueError, TypeError, AttributeError, KeyError):
        raise keys.wrong(key, "is no file of data that is read") from None


def _sizes(text: str) -> Facts:
    """The largest of the sizes in a file of data."""
    sizes = [[1] * (kind == "image") + size for kind, listed in BUCKETS.findall(text) for size in json.loads(listed)]
    frames, height, width = max(sizes, key=math.prod)
    return sized(frames, height, width)


def _family(keys: Keys) -> str | None:
    return named(keys, stated(keys, NAME), table("finetrainers").get(keys.word("model_name") or "", ""), "--model_name")


def _layout(keys: Keys) -> Facts:
    shards, replicas = keys.whole("dp_shards") or 1, keys.whole("dp_degree") or 1
    facts = {"tp": keys.whole("tp_degree") or 1, "cp": keys.whole("cp_degree") or 1, "dp": shards * replicas}
    return facts | ({"zero": 3, "shards": shards, "replicas": replicas} if shards > 1 else {})


FINETRAINERS = Dialect(
    name="finetrainers",
    title="finetrainers",
    versions="finetrainers 0.1 - 0.2",
    syntaxes=("argv",),
    style="flags",
    blank={"argv": "torchrun train.py --model_name flux --training_type lora\n"},
    ideas=(
        launched(),
        Idea(
            keys=("model_name", NAME),
            facts=("model",),
            read=lambda keys: {"model": _family(keys)},
            write=lambda facts, keys: {NAME: facts.get("model") or None},
        ),
        fixed("dp_degree", "dp_shards", "tp_degree", "cp_degree"),
        Idea(keys=(), facts=names_in("tp cp dp zero shards replicas"), read=_layout),
        Idea(
            keys=("dataset_config",),
            facts=("pictures", "video"),
            read=lambda keys: of_data(keys, "dataset_config", _sizes),
        ),
        row("micro_batch", "batch_size", default=1),
        ACCUMULATION,
        CHECKPOINTS,
        Idea(
            keys=("training_type", "rank", "target_modules"),
            facts=names_in("precision lora_rank lora_targets lora_dtype"),
            read=_trained,
            write=lambda facts, keys: {
                "training_type": "lora" if facts.get("lora_rank") else "full-finetune",
                "rank": facts.get("lora_rank") or None,
            },
        ),
        fixed("enable_precomputation", encoders=lambda keys: "cached" if keys.flag("enable_precomputation") else "all"),
        fixed("optimizer", optimizer=lambda keys: optimizer(keys, (keys.word("optimizer") or "adam").lower())),
        compiled("compile_modules", default=lambda keys: keys.document.get("compile_modules") is not MISSING),
    ),
)

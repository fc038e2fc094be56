"""Towers beside a language model: their names in a config, their layers by tables, and their parameters where both are known."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, Mlp, Norm, Part, Rule, Step, Tower

KEYS = ("vision_config", "audio_config", "talker_config", "code2wav_config")
"""Where configs have them, at the top or in `thinker_config`."""
SEES, HEARS = "vision_config", "audio_config"
"""Sections that a model of text and images, or of text and sounds, has even where its config leaves them to the class."""
LISTENING = ("qwen2_audio", "voxtral")
LAYER_NORM, RMS = Norm("layernorm", bias=True), Norm("rmsnorm")
GEMMA = Norm("rmsnorm", gain_float32=True, root_kept=True)


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a tower. Sizes are letters, of which `keys` says by which keys of its config they are read.

    stem, end: steps before and after its blocks; deep: those after single blocks, beside them; scaled, hooked: as of `Part`;
    spare: as of `Rule`; narrow: as of `Part.enters`; own_norms: queries, keys and values have norms; qk_norms: the key that says
    whether queries and keys have, over all heads together
    """

    stem: str
    end: str = ""
    norm: Norm = LAYER_NORM
    placement: Any = "pre"
    gated: bool = False
    bias: bool = True
    qkv_bias: bool | str = True
    fused: bool = False
    rotary: bool = False
    act: str = "hidden_act|gelu"
    scaled: bool = False
    deep: str = ""
    spare: int = 0
    own_norms: bool = False
    qk_norms: str = ""
    hooked: bool = False
    narrow: bool = False
    key_bias: bool = True
    keys: Mapping[str, str] = {}


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Way in which a model type joins its tower. made: the tower where its config names none; end: steps that join it, after a
    semicolon where others before them are the tower's own

    rule: what its processor does with pictures, and low, high, tile, volume, marks, each and pool: its limits, as numbers or
    keys; copied: tiles that hold a picture are chosen or joined first, which makes a copy of them; features: those of a single
    layer go on, by default this one; masks: the language model's attention has a mask of all pairs, always or where its config
    says what looks both ways; head: as of `Rule`
    """

    made: str = ""
    end: str = ""
    rule: str
    merge: str = "1"
    low: str = "0"
    high: str = "0"
    tile: str = "0"
    marks: int = 0
    each: int = 0
    pool: int = 1
    frames: str = "1"
    volume: tuple[int, int] = (0, 0)
    head: str = ""
    copied: bool = False
    features: int = 0
    masks: str = ""


USUAL = {
    "w": "hidden_size", "d": "num_hidden_layers|depth", "a": "num_attention_heads|num_heads", "i": "intermediate_size",
    "k": "patch_size", "c": "num_channels|in_channels|in_chans|3", "f": "temporal_patch_size|1", "g": "image_size|0",
    "m": "spatial_merge_size|1", "t": "text_config.hidden_size", "g2": "num_key_value_heads|num_attention_heads|num_heads",
    "u": "config.alignment_intermediate_size",
}  # fmt: skip
MERGED = "linear q q +, gelu, linear q o +"
FUSED: dict[str, Any] = {"fused": True, "rotary": True}
QWEN: dict[str, Any] = {**FUSED, "narrow": True}
WHISPER: dict[str, Any] = {
    "hooked": True, "key_bias": False, "act": "activation_function|gelu",
    "keys": {
        "w": "d_model|hidden_size", "d": "encoder_layers|num_hidden_layers", "a": "encoder_attention_heads|num_attention_heads",
        "g2": "encoder_attention_heads|num_attention_heads", "i": "encoder_ffn_dim|intermediate_size", "c": "num_mel_bins|128",
        "p": "max_source_positions|1500", "o": "output_dim", "k": "2",
    },
}  # fmt: skip
FRAMES = "sound c w +, gelu, halve w w +, gelu"
PATCHES, TABLE = "conv v w", "conv v w +, positions p w"

MADE = {
    "siglip_vision_model": Made(hooked=True, stem=TABLE, end="layernorm w, idle h"),
    "siglip2_vision_model": Made(
        hooked=True, stem="linear v w +, positions p w", end="layernorm w, idle h",
        keys={"p": "num_patches|256", "u": "config.projector_hidden_size|2560"},
    ),
    "clip_vision_model": Made(stem="conv v w, vector w, positions p w, layernorm w", end="idle 2w", spare=1, hooked=True),
    "pixtral": Made(
        stem="conv v w, cropped w, rmsnorm w, mask", norm=RMS, gated=True, bias=False, qkv_bias=False, rotary=True, hooked=True
    ),
    "internvl_vision": Made(
        stem="conv v w +, vector w, positions p w", qkv_bias="attention_bias", scaled=True, spare=1, hooked=True,
        qk_norms="use_qk_norm",
    ),
    "kimi_k25_vision": Made(
        stem="conv v w +, positions p3 w", rotary=True, end="layernorm w", act="hidden_act|gelu_pytorch_tanh",
        keys={"w": "hidden_size|vt_hidden_size", "d": "num_hidden_layers|vt_num_hidden_layers",
              "a": "num_attention_heads|vt_num_attention_heads", "i": "intermediate_size|vt_intermediate_size",
              "g2": "num_attention_heads|vt_num_attention_heads"},
    ),
    "dots_vit": Made(
        stem="conv v w +, rmsnorm w", norm=RMS, gated=True, bias=False, qkv_bias=False, **QWEN, act="hidden_act|silu",
        end="rmsnorm w, layernorm w, linear q q +, gelu, linear q t +", keys={"w": "embed_dim"},
    ),
    "idefics3_vision": Made(stem=TABLE, end="layernorm w", hooked=True),
    "glm4v_vision": Made(
        stem="conv v w +, rmsnorm w, positions p w", norm=RMS, gated=True, bias=False, qkv_bias=False, **FUSED,
        end="rmsnorm w, conv q o +, linear o o, layernorm o, gelu, mlp o j",
        keys={"i": "out_hidden_size", "j": "intermediate_size"},
    ),
    "gemma4_vision": Made(
        stem="rescale v, linear v w, positions p2 w", norm=GEMMA, placement="sandwich", gated=True, bias=False,
        qkv_bias=False, rotary=True, own_norms=True, act="hidden_activation",
    ),
    "qwen2_vl": Made(
        stem=PATCHES, **QWEN, end="layernorm w, " + MERGED, act="hidden_act|quick_gelu", hooked=True,
        keys={"w": "embed_dim", "o": "hidden_size", "i": "mlp_ratio"},
    ),
    "qwen2_5_vl": Made(
        stem=f"{PATCHES}, cropped w", norm=RMS, gated=True, **QWEN, end="rmsnorm w, " + MERGED, act="hidden_act|silu", hooked=True,
    ),
    "qwen3_vl": Made(
        stem=TABLE, **QWEN, end="layernorm w, " + MERGED, deep="layernorm q, " + MERGED, act="hidden_act|gelu_pytorch_tanh",
        keys={"p": "num_position_embeddings"},
    ),
    "llama4_vision_model": Made(
        stem="linear v w, vector w, positions p w, layernorm w", rotary=True, spare=1,
        end="layernorm w, linear i e, gelu, linear n n, gelu",
        keys={"e": "projector_input_dim", "n": "projector_output_dim", "r": "vision_output_dim"},
    ),
    "whisper": Made(stem=f"{FRAMES}, fixed p w", **WHISPER),
    "whisper_in_chunks": Made(stem=FRAMES, **WHISPER),
}  # fmt: skip
"""Towers by the `model_type` of their config, or by the word of `Joined.made`."""

TILES: dict[str, Any] = {
    "made": "siglip_vision_model",
    "rule": "canvas",
    "merge": "config.downsample_factor|2",
    "tile": "image_size",
}
TWO_LAYERS, HALVES = "linear w t +, gelu, linear t t +", "linear y u +, swiglu u u2, linear u2 t +"
NEXT: dict[str, Any] = {
    "end": TWO_LAYERS + ", idle t",
    "features": -2,
    "rule": "anyres",
    "tile": "image_size",
    "copied": True,
}
AREA: dict[str, Any] = {"rule": "area", "merge": "spatial_merge_size|2", "frames": "temporal_patch_size|2"}
OLD = Joined(made="qwen2_vl", low="3136", high="12845056", **AREA)
NEW = Joined(made="qwen3_vl", low="65536", high="16777216", volume=(4096, 25165824), **AREA)
GLM = Joined(made="glm4v_vision", low="6272", high="4816896", volume=(12544, 47040000), **AREA)
SPLIT: dict[str, Any] = {
    "made": "idefics3_vision",
    "end": "linear s t",
    "rule": "split",
    "tile": "image_size",
    "copied": True,
}
JOINED = {
    "gemma3": Joined(
        made="siglip_vision_model", end="pool x, rmsnorm1 w, matrix w t", rule="fixed", tile="image_size",
        high="config.mm_tokens_per_image|256", masks="always",
    ),
    "gemma4": Joined(made="gemma4_vision", end="blend x, unweighted w, linear w t", rule="budget", merge="pooling_kernel_size|3",
                     high="config.vision_soft_tokens_per_image|280", masks="vision"),
    "internvl": Joined(made="internvl_vision", end="layernorm y, linear y t +, gelu, linear t t +", rule="canvas", merge="2",
                       tile="image_size", low="1", high="12", marks=2),
    "aya_vision": Joined(**TILES, features=-1, end=f"layernorm y, {HALVES}", low="1", high="12", marks=2, each=1),
    "cohere2_vision": Joined(**TILES | {"rule": "fit"}, end=HALVES, high="12", marks=3),
    "paligemma": Joined(made="siglip_vision_model", end="linear w t +", rule="fixed", tile="image_size", masks="always"),
    "kimi_k25": Joined(made="kimi_k25_vision", end="layernorm w, linear q q +, gelu, linear q t +", rule="native",
                       merge="merge_kernel_size|2", low="512", high="config.in_token_limit|16384"),
    "dots_ocr": Joined(made="dots_vit", rule="area", merge="spatial_merge_size|2", low="3136", high="11289600"),
    "minicpmv": Joined(made="siglip_vision_model", end="linear w t, layernorm t, attend t 64, layernorm t, linear t t",
                       rule="slices", tile="config.scale_resolution|448", low="64", high="config.max_slice_nums|9", each=2),
    "lfm2_vl": Joined(made="siglip2_vision_model", end="layernorm y, linear y u +, gelu, linear u t +", rule="thumbs",
                      merge="config.downsample_factor|2", tile="config.tile_size|512", low="64", high="10", marks=2, each=1),
    "llava": Joined(made="clip_vision_model", end=TWO_LAYERS, features=-2, rule="fixed", tile="image_size"),
    "deepseek_vl": Joined(made="siglip_vision_model", end=TWO_LAYERS, rule="fixed", tile="image_size"),
    "llava_next": Joined(made="clip_vision_model", **NEXT),
    "llava_onevision": Joined(made="siglip_vision_model", **NEXT, high="9", pool=2),
    "mistral3": Joined(
        made="pixtral", end="rmsnorm w, linear y w, linear w t, gelu, linear t t", rule="edge", high="image_size|1540",
        merge="config.spatial_merge_size|2",
    ),
    "llama4": Joined(made="llama4_vision_model", end="linear r t", rule="fit", merge="2", tile="image_size", high="16", marks=3,
                     copied=True, head="inner"),
    "idefics3": Joined(**SPLIT, marks=3),
    "smolvlm": Joined(**SPLIT, marks=3),
    "qwen2_vl": OLD,
    "qwen2_5_vl": msgspec.structs.replace(OLD, made="qwen2_5_vl"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe"), NEW),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), GLM),
}  # fmt: skip
"""How a tower is joined, and which pictures it gets, by the `model_type` around it. Limits are those of published processors."""


HEARD = {
    "qwen2_audio": Joined(made="whisper", end="pool 2, layernorm w; linear w t +", rule="padded", merge="2", tile="3000",
                           head="inner shifted"),
    "voxtral": Joined(made="whisper", end="layernorm w; linear 4w t, gelu, linear t t", rule="windows", merge="4", tile="3000"),
    "qwen2_5_vl": Joined(made="whisper_in_chunks", end="pool 2, layernorm w, linear w o +, idle 2o", rule="chunks", merge="2",
                           tile="n_window|100"),
}  # fmt: skip
"""The same of what hears, and of sounds (of Qwen2.5-VL's kind: Qwen2.5-Omni's)."""


def towers(config: Mapping[str, Any], model_type: str, beside: bool) -> tuple[Tower, ...]:
    """Return the towers of a config. beside: whether its family reads the language model of a model of text and images.

    >>> towers({"audio_config": {"depth": 2}}, "gemma4", True)[1].name
    'audio_config'
    """
    around = config.get("thinker_config")
    inner: dict[str, Any] = around if isinstance(around, dict) else {}
    stated: dict[str, Any] = {}
    for key in KEYS:
        section = f"thinker_config.{key}" if not config.get(key) and inner.get(key) else key
        value = config.get(key) or inner.get(key)
        if value or (beside and key == (HEARS if model_type in LISTENING else SEES)):
            stated[section] = value
    return tuple(_tower(name, value, config, model_type) for name, value in stated.items())


def _tower(name: str, tower: Any, config: Mapping[str, Any], model_type: str) -> Tower:
    """A tower with its layers and its rule; without them where its sizes are left to the class, or are none."""
    own = {"vision_config": JOINED, "audio_config": HEARD}.get(name.rpartition(".")[2], {})
    joined = own.get(model_type)
    if joined is None or not isinstance(tower, dict):
        return Tower(name)
    try:
        shape = MADE[_named(tower, joined)]
        layers, rule = _layers(shape, joined, Sizes(tower, config, shape.keys, joined))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return Tower(name)
    return Tower(name, sum(map(_counted, layers)), layers, rule)


def _named(tower: Mapping[str, Any], joined: Joined) -> str:
    own = str(tower.get("model_type", ""))
    return own if own in MADE and joined.end else joined.made


class Sizes:
    """Sizes by their letters; a number before a letter multiplies it, one after it is a letter of its own."""

    def __init__(
        self, tower: Mapping[str, Any], config: Mapping[str, Any], keys: Mapping[str, str], joined: Joined
    ) -> None:
        self.tower, self.config, self.keys, self.joined = tower, config, {**USUAL, **keys}, joined
        self.derived: dict[str, Callable[[], int]] = {
            "v": lambda: self["c"] * self["f"] * self["k"] ** 2,
            "q": lambda: self.read("spatial_merge_size|merge_kernel_size|2") ** 2 * self["w"],
            "y": lambda: self.read(joined.merge) ** 2 * self["w"],
            "s": lambda: self.read("config.scale_factor|2") ** 2 * self["w"],
            "o": lambda: self.read("out_hidden_size"),
            "p": lambda: (self["g"] // self["k"]) ** 2 + (MADE[_named(tower, joined)].spare),
            "p3": lambda: self.read("pos_emb_height|init_pos_emb_height|64") * self.read("pos_emb_width|init_pos_emb_width|64"),
            "u2": lambda: self["u"] // 2,
            "p2": lambda: 2 * self.read("position_embedding_size"),
            "x": lambda: self.pooled,
            "h": lambda: _blocks(self["w"], self["i"]) if tower.get("vision_use_head", True) else 0,
        }  # fmt: skip

    def read(self, keys: str) -> int:
        """The first of some keys, of the tower, or after a dot of the whole config, that is a size; or a number."""
        for key in keys.split("|"):
            keyed: Any = self.tower
            if "." in key:
                first, _, key = key.partition(".")
                keyed = self.config if first == "config" else self.config.get(first) or self.config
            value = int(key) if key.isdecimal() else keyed.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int | float):
                return int(value)
        raise KeyError(keys)

    def __getitem__(self, letter: str) -> int:
        times = re.match(r"\d*", letter)
        number = times[0] if times else ""
        letter = letter[len(number) :]
        own = self.read(self.keys[letter]) if letter in self.keys else self.derived[letter]()
        return int(number or 1) * own

    @property
    def pooled(self) -> int:
        """Patches that are averaged into a token."""
        if self.joined.rule == "budget":
            return self.read(self.joined.merge) ** 2
        return (self["g"] // self["k"]) ** 2 // self.read(self.joined.high)


def _steps(text: str, sizes: Sizes) -> tuple[Step, ...]:
    """The steps of a text, such as `linear w t +, gelu`."""
    steps = []
    for words in (step.split() for step in text.split(",") if step.strip()):
        numbers = [int(word) if word.isdecimal() else sizes[word] for word in words[1:] if word != "+"]
        width, output, *_ = [*(numbers[::-1] if words[0] in ("positions", "fixed") else numbers), 0, 0]
        steps.append(Step(words[0], width, output, "+" in words))
    return tuple(step for step in steps if step.kind != "idle" or step.width)


def _layers(shape: Made, joined: Joined, sizes: Sizes) -> tuple[tuple[Block, ...], Rule]:
    """The layers of a tower, first to last, and how pictures are cut for it."""
    width, heads, depth = sizes["w"], sizes["a"], sizes["d"]
    inner = sizes["i"] * (width if shape.keys.get("i") == "mlp_ratio" else 1)
    acts = shape.act.split("|")
    own = GEMMA if shape.own_norms else RMS if sizes.tower.get(shape.qk_norms) else None
    norm = RMS if sizes.tower.get("norm_type") == "rms_norm" else shape.norm
    qkv = bool(sizes.tower.get(shape.qkv_bias, False)) if isinstance(shape.qkv_bias, str) else shape.qkv_bias
    enters = (
        "normed" if shape.stem.endswith("layernorm w") else "narrow" * shape.narrow + "masked" * ("mask" in shape.stem)
    )
    ways: dict[str, Any] = {"hooked": shape.hooked, "enters": enters}
    attention = Attention(
        num_attention_heads=heads,
        num_key_value_heads=sizes["g2"],
        head_dim=sizes.read("head_dim|0") or width // heads,
        qkv_bias=qkv,
        key_bias=shape.key_bias,
        output_bias=shape.bias,
        fused_qkv=shape.fused,
        rotary=shape.rotary,
        # Each picture is attended to by itself, and what comes out is joined; Whisper lays its heads out one after another.
        heads_first=shape.fused or not shape.key_bias,
        masked=joined.rule in ("padded", "thumbs"),
        causal=False,
        qk_norm=own,
        qk_norm_over="all" if shape.qk_norms else "head",
        value_norm=msgspec.structs.replace(GEMMA, weight=False) if shape.own_norms else None,
    )
    part = Part(width=width, scaled=shape.scaled, **ways)
    block = Block(
        attention=attention,
        mlp=Mlp(
            intermediate_size=inner,
            gated=shape.gated,
            bias=shape.bias,
            activation=next((sizes.tower[key] for key in acts if isinstance(sizes.tower.get(key), str)), acts[-1]),
        ),
        norm=norm,
        placement=shape.placement,
        tower=part,
    )

    def of_steps(text: str, of_width: int = width, **own: Any) -> Block:
        part = Part(width=of_width, steps=_steps(text, sizes), **ways, **own)
        return Block(attention=None, mlp=None, norm=shape.norm, tower=part)

    side = sizes.read("window_size|0") // sizes["k"]
    whole = sizes.tower.get("fullatt_block_indexes", range(depth))
    near = msgspec.structs.replace(block, attention=msgspec.structs.replace(attention, sliding_window=side**2))
    layers = [of_steps(f"copied v, {shape.stem}" if joined.copied else shape.stem)]
    if shape.rotary:
        layers.append(of_steps(f"angles {attention.head_dim}", beside=True))
    unused = msgspec.structs.replace(block, tower=Part(width=width, unused=True))
    feature = sizes.config.get("vision_feature_layer", joined.features or -1)
    several = feature if isinstance(feature, list) else [feature]  # Granite Vision joins those of four layers
    last = max(several) + depth if max(several) < 0 and joined.end else depth
    first = msgspec.structs.replace(part, enters=enters if enters == "normed" else f"{enters} first")
    for index in range(depth):
        layers.append(unused if index > last else near if side and index not in whole else block)
        if not index:
            layers[-1] = msgspec.structs.replace(layers[-1], tower=first)
        if shape.deep and index in (sizes.tower.get("deepstack_visual_indexes") or ()):
            layers.append(of_steps(shape.deep, projects=True, beside=True))
    # Of features of single layers, what follows the last of them is not read.
    end = re.sub(r"layernorm (\w+)", r"idle 2\1", shape.end) if joined.features else shape.end
    *own_ends, joins = "; ".join(text for text in (end, joined.end) if text).split("; ")
    if len(several) > 1:
        joins = joins.replace("linear w", f"join w {len(several)}w, linear {len(several)}w", 1)
    came = width
    for text in own_ends:
        layers.append(of_steps(text, came, projects=True, own=True))
        for step in _steps(text, sizes):  # channels for each patch that came in
            came = (
                came * step.output // step.width if step.output else came // (step.width if step.kind == "pool" else 1)
            )
    layers.append(of_steps(joins, came, projects=True))
    grids = sizes.config.get("image_grid_pinpoints") or () if joined.rule == "anyres" else ()
    edge = joined.rule == "fixed" and _named(sizes.tower, joined) == "pixtral"
    rule = Rule(
        kind="edge" if edge else joined.rule,
        patch=sizes["k"],
        merge=sizes.read("config.scale_factor|2") if joined.rule == "split" else sizes.read(joined.merge),
        tile=sizes.read(joined.tile),
        low=sizes.read(joined.low),
        high=sizes["g"] if edge else sizes.read(joined.high),
        spare=shape.spare,
        marks=joined.marks,
        each=joined.each,
        pool=joined.pool,
        frames=sizes.read(joined.frames),
        volume=joined.volume,
        head=joined.head,
        masks=joined.masks
        in ("always", (sizes.config.get("text_config") or {}).get("use_bidirectional_attention") or "always"),
        grids=tuple((int(grid[0]), int(grid[1])) for grid in grids),
    )
    return tuple(layers), rule


def _blocks(width: int, inner: int) -> int:
    """The pooling head of SigLIP: a probe, attention, a norm and an MLP."""
    return 4 * width * width + 4 * width + 2 * width * inner + inner + width + 3 * width


def _counted(block: Block) -> int:
    """The parameters of a layer of a tower."""
    part, mixer, mlp = block.tower, block.attention, block.mlp
    assert part is not None
    total = sum(map(_of_step, part.steps))
    if isinstance(mixer, Attention) and isinstance(mlp, Mlp):
        width, inner = part.width, mlp.intermediate_size
        query, both = mixer.num_attention_heads * mixer.head_dim, 2 * mixer.num_key_value_heads * mixer.head_dim
        columns = query + both
        total += (
            width * (columns + query)
            + mixer.qkv_bias * (columns - (not mixer.key_bias) * both // 2)
            + mixer.output_bias * width
        )
        total += (2 + mlp.gated) * width * inner + mlp.bias * ((1 + mlp.gated) * inner + width)
        total += (4 if block.placement == "sandwich" else 2) * (1 + block.norm.bias) * width + 2 * part.scaled * width
        heads = {"head": (1, 1), "all": (mixer.num_attention_heads, mixer.num_key_value_heads)}
        total += sum(heads.get(mixer.qk_norm_over, ())) * mixer.head_dim if mixer.qk_norm is not None else 0
    return int(total)


def _of_step(step: Step) -> int:
    i, o = step.width, step.output
    return {
        "conv": i * o + step.bias * o, "matrix": i * o, "linear": i * o + step.bias * o, "mlp": 3 * i * o, "layernorm": 2 * i,
        "rmsnorm": i, "attend": i * o + 2 * i + 4 * i * (i + 1),
        "rmsnorm1": i, "positions": i * o, "fixed": i * o, "vector": i, "idle": i, "sound": 3 * i * o + o, "halve": 3 * i * o + o,
    }.get(step.kind, 0)  # fmt: skip

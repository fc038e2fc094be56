"""Pictures and sounds of a job: how each family's processor cuts them, and the model that sees and hears them."""

import math
import re
from collections.abc import Callable, Iterator
from math import ceil, floor, log, sqrt
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import Attention, Block, ModelSpec, Rule, Tower

LONGEST = 4096
"""Of Idefics 3's pictures [pixels]."""


class Cut(NamedTuple):
    """A picture as a model sees it: tiles, patches in each, and tokens that take places in the sequence."""

    tiles: int
    patches: int
    tokens: int


def cut(rule: Rule, width: int, height: int) -> Cut:
    """Return the size of a picture after the processor [pixels]. Raises `ConfigError` for one that is too narrow.

    >>> cut(Rule(kind="area", patch=14, merge=2, low=3136, high=12845056), 1024, 768)
    Cut(tiles=1, patches=3996, tokens=999)
    """
    if max(width, height) > 200 * min(width, height):
        raise ConfigError(f"{width}x{height}: one side is more than 200 times the other", key="pictures")
    return RULES[rule.kind](rule, width, height)


def frame(rule: Rule, width: int, height: int) -> Cut:
    """Return the size of a video's frame after the processor, which is not cut into tiles.

    >>> frame(Rule(kind="canvas", patch=14, merge=2, tile=448, low=1, high=12, spare=1), 1920, 1080)
    Cut(tiles=1, patches=1025, tokens=256)
    """
    if not rule.tile or rule.kind == "fixed":
        return cut(rule, width, height)
    seen = _tiled(rule, 1)
    side = ceil(rule.tile // rule.patch / rule.pool)
    return seen if rule.pool == 1 else seen._replace(tokens=side**2)


def _sides(rule: Rule, width: float, height: float, round_: Callable[[float], int]) -> tuple[int, int]:
    step = rule.patch * rule.merge
    return max(1, round_(width / step)), max(1, round_(height / step))


def _whole(rule: Rule, sides: tuple[int, int], more: int = 0) -> Cut:
    tokens = sides[0] * sides[1]
    return Cut(1, tokens * rule.merge**2, tokens + more)


def _tiled(rule: Rule, tiles: int, tokens: int | None = None) -> Cut:
    side = rule.tile // rule.patch
    each = (side // rule.merge) ** 2
    return Cut(tiles, side**2 + rule.spare, tiles * (each + rule.each) + rule.marks if tokens is None else tokens)


def _area(rule: Rule, width: int, height: int) -> Cut:
    """Sides are multiples of a token's, and pixels within limits (source: transformers, Qwen2-VL's `smart_resize`)."""
    sides = _sides(rule, width, height, round)
    pixels = sides[0] * sides[1] * (rule.patch * rule.merge) ** 2
    if pixels > rule.high:
        share = sqrt(width * height / rule.high)
        sides = _sides(rule, width / share, height / share, floor)
    elif pixels < rule.low:
        share = sqrt(rule.low / (width * height))
        sides = _sides(rule, width * share, height * share, ceil)
    return _whole(rule, sides)


def _edge(rule: Rule, width: int, height: int) -> Cut:
    """The longer side within a limit; a token ends each row (Pixtral)."""
    share = max(1.0, width / rule.high, height / rule.high)
    sides = _sides(rule, floor(width / share), floor(height / share), ceil)
    return _whole(rule, sides, sides[1])


def _budget(rule: Rule, width: int, height: int) -> Cut:
    """Makes as many pixels as a number of tokens has (Gemma 4)."""
    side = rule.patch * rule.merge
    share = sqrt(rule.high * side**2 / (width * height))
    return _whole(rule, _sides(rule, width * share, height * share, floor))


def _native(rule: Rule, width: int, height: int) -> Cut:
    """Made smaller where it has more patches than it may, or more along a side, and padded to whole tokens (MoonViT)."""
    patches = (width // rule.patch) * (height // rule.patch)
    most = rule.low * rule.patch
    share = min(1.0, sqrt(rule.high / max(1, patches)), most / width, most / height)
    return _whole(rule, _sides(rule, min(most, int(width * share)), min(most, int(height * share)), ceil))


def _slices(rule: Rule, width: int, height: int) -> Cut:
    """Slices, as many as a picture has squares, in the grid of about so many whose shape is nearest, and one of the whole;
    each comes to a number of queries (MiniCPM-V)."""
    most = min(ceil(width * height / rule.tile**2), rule.high)
    counts = [count for count in (most - 1, most, most + 1) if 1 < count <= rule.high] if most > 1 else []
    grids = [(across, count // across) for count in counts for across in range(1, count + 1) if count % across == 0]
    best = min(grids, key=lambda grid: abs(log(width / height) - log(grid[0] / grid[1])), default=(0, 0))
    tiles = 1 + best[0] * best[1]
    return _tiled(rule, tiles, tiles * (rule.low + rule.each))


def _fixed(rule: Rule, width: int, height: int) -> Cut:
    """Whatever its size, one tile."""
    return _tiled(rule, 1, rule.high or None)


def _canvas(rule: Rule, width: int, height: int) -> Cut:
    """The grid of tiles whose shape is nearest, and one tile of the whole picture (InternVL)."""
    grids = [(a, b) for a in range(1, rule.high + 1) for b in range(1, rule.high + 1) if rule.low <= a * b <= rule.high]
    best, off = (1, 1), float("inf")
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        here = abs(width / height - grid[0] / grid[1])
        if here < off or (here == off and width * height > rule.tile**2 * grid[0] * grid[1] / 2):
            best, off = grid, min(off, here)
    tiles = best[0] * best[1]
    return _tiled(rule, tiles + (tiles > 1))


def _thumbs(rule: Rule, width: int, height: int) -> Cut:
    """A picture of as many pixels as up to two tiles have is one; others are a grid of tiles, and a small one of the whole. Each is
    padded to a tile's patches (LFM2-VL)."""
    pixels = (rule.patch * rule.merge) ** 2
    most = rule.tile**2
    whole = _area(msgspec.structs.replace(rule, low=rule.low * pixels, high=most), width, height).tokens + rule.marks
    sides = (round(side / (rule.patch * rule.merge)) for side in (width, height))
    if math.prod(sides) * pixels <= 2 * most:
        return _tiled(rule, 1, whole)
    seen = _canvas(msgspec.structs.replace(rule, low=2), width, height)
    return seen._replace(tokens=(seen.tiles - 1) * (most // pixels + rule.each) + rule.each + whole)


def _fit(rule: Rule, width: int, height: int) -> Cut:
    """The grid of tiles that enlarges least, or reduces least, and a tile of the whole; marks stand around them (Llama 4)."""
    grids = [(a, b) for a in range(1, rule.high + 1) for b in range(1, rule.high // a + 1)]
    scales = {grid: min(grid[0] * rule.tile / width, grid[1] * rule.tile / height) for grid in grids}
    best = min((scale for scale in scales.values() if scale >= 1), default=max(scales.values()))
    tiles = min(grid[0] * grid[1] for grid, scale in scales.items() if scale == best)
    seen = _tiled(rule, tiles + (tiles > 1))
    return seen._replace(tokens=seen.tokens + (tiles if tiles > 1 else 0))


def _split(rule: Rule, width: int, height: int) -> Cut:
    """The longer side is made four tiles, and a tile of the whole follows; marks stand around tiles and rows (Idefics 3)."""
    longer, ratio = min(4 * rule.tile, LONGEST), width / height
    shorter = int(longer / ratio) if width >= height else int(longer * ratio)
    sides = ceil(longer / rule.tile), ceil((shorter + shorter % 2) / rule.tile)
    columns, rows = sides if width >= height else sides[::-1]
    each = _tiled(rule, 1)
    return each._replace(tiles=rows * columns + 1, tokens=each.tokens + rows * (columns * (each.tokens - 1) + 1))


def _anyres(rule: Rule, width: int, height: int) -> Cut:
    """The one of several grids that loses least; what pads it is taken out, and a token ends each row (LLaVA-NeXT)."""
    if not rule.grids:
        raise NotModelled("pictures of any size need image_grid_pinpoints in the config")

    def fit(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        seen = min(int(width * scale) * int(height * scale), width * height)
        return seen, seen - grid[0] * grid[1]

    grid = max(rule.grids, key=fit)
    side = rule.tile // rule.patch
    tall, wide = side * (grid[0] // rule.tile), side * (grid[1] // rule.tile)
    if width / height > wide / tall:
        tall -= (tall - int(round(height * wide / width, 7))) // 2 * 2
    else:
        wide -= (wide - int(round(width * tall / height, 7))) // 2 * 2
    share = sqrt(tall * wide / (rule.high * side**2)) if rule.high else 1.0
    if share > 1.1:
        tall, wide = int(tall // share), int(wide // share)
    tiles = 1 + (grid[0] // rule.tile) * (grid[1] // rule.tile)
    return _tiled(rule, tiles, tall * wide + tall + side**2)


RULES: dict[str, Callable[[Rule, int, int], Cut]] = {
    "area": _area, "edge": _edge, "budget": _budget, "fixed": _fixed, "canvas": _canvas, "split": _split, "fit": _fit,
    "anyres": _anyres, "native": _native, "slices": _slices, "thumbs": _thumbs,
}  # fmt: skip


class Seen(NamedTuple):
    """A model with its tower, the tokens of a sequence that pictures and frames take, and what they are in words."""

    model: ModelSpec
    tokens: int
    words: str


def read_pictures(text: str, key: str) -> Iterator[tuple[int, int, int]]:
    """Yield how many pictures (or frames) of which width and height [pixels] a text names. Raises `ConfigError`, naming `key`.

    >>> list(read_pictures("2x1024x768,512x512", "pictures"))
    [(2, 1024, 768), (1, 512, 512)]
    """
    for word in text.split(","):
        numbers = re.fullmatch(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,4})x([1-9]\d{0,4})", word.strip())
        if numbers is None:
            raise ConfigError(f"must be such as 2x1024x768 (how many, width, height), got {word!r}", key=key)
        yield int(numbers[1] or 1), int(numbers[2]), int(numbers[3])


def with_pictures(
    model: ModelSpec,
    pictures: str,
    video: str,
    trained: str,
    adapts: bool,
    most: int | None = None,
    audio: float | None = None,
    masks: bool = True,
) -> Seen:
    """Return a model with the towers that see a sequence's pictures and the frames of its video, and hear its sound of `audio`
    seconds, and the tokens that they are.

    trained: what of a tower is: frozen, projector, adapters or trained; adapts: whether the language model has adapters; most:
    pixels of a picture, where a job states them; masks: whether attention's kernel takes them. Raises `ConfigError` or
    `NotModelled`.
    """
    layers: list[Block] = []
    tokens, words, counted, anywhere, masked = 0, [], [], False, False
    for key, section in (("pictures" if pictures else "video", "vision_config"), ("audio", "audio_config")):
        if not (audio if key == "audio" else pictures or video):
            continue
        tower = _tower(model, key, section)
        rule = tower.rule
        assert rule is not None
        if key == "audio":
            each, own = heard(rule, audio or 0.0)
        else:
            each, own = _seen(rule, pictures, video, most)
        reached, masked = False, masked or rule.masks
        if rule.head:
            head = msgspec.structs.replace(model.head, inner=True, loss_float32="shifted" not in rule.head)
            model = msgspec.structs.replace(model, head=head)
        for block in tower.layers:
            assert block.tower is not None
            whole = not block.tower.unused and (
                trained == "trained" or (trained == "projector" and block.tower.projects and not block.tower.own)
            )
            tuned = trained == "adapters" and (
                block.attention is not None or any(s.kind in ("linear", "angles") for s in block.tower.steps)
            )
            part = msgspec.structs.replace(block.tower, **each, whole=whole and adapts)
            changes: dict[str, Any] = {
                "trained": None if whole or tuned else frozenset(),
                "adapted": tuned or not adapts,
                "reached": reached and not block.tower.unused,
            }
            layers.append(msgspec.structs.replace(block, tower=part, **changes))
            if block.tower.unused:
                continue
            anywhere = anywhere or whole or tuned
            # What lies beside the next layer hands nothing on to it.
            reached = reached or ((whole or tuned) and not block.tower.beside)
        tokens += own
        words.append(f"{each['patches']:,} {'frames' if key == 'audio' else 'patches'}, {own:,} tokens")
        counted.append(section)
    if masked:
        model = msgspec.structs.replace(model, blocks=tuple(_masked(block, True) for block in model.blocks))
    before = _before(model, layers, anywhere, adapts)
    if not masks:
        before = msgspec.structs.replace(before, blocks=tuple(_masked(block, False) for block in before.blocks))
    left = tuple(key for key in model.unused_keys if not key.startswith(tuple(counted)))
    return Seen(msgspec.structs.replace(before, unused_keys=left), tokens, " and ".join(words))


def _masked(block: Block, masked: bool) -> Block:
    """A block whose attention has a mask of all pairs, or none."""
    mixer = block.attention
    own = msgspec.structs.replace(mixer, masked=masked) if isinstance(mixer, Attention) else mixer
    return msgspec.structs.replace(block, attention=own)


def _tower(model: ModelSpec, key: str, section: str) -> Tower:
    """The tower of a model for pictures or sounds. Raises `ConfigError` without one."""
    tower = next((tower for tower in model.towers if tower.name.endswith(section)), None)
    if tower is None:
        if key == "audio":
            raise ConfigError(f"{model.name} takes no sound of any length", key=key)
        raise ConfigError(
            f"{model.name}: no tower of pictures is in its sizes here; if it has one, type its published config.json,"
            " without --pictures for one picture by its own code",
            key=key,
        )
    return tower


def _seen(rule: Rule, pictures: str, video: str, most: int | None) -> tuple[dict[str, Any], int]:
    """Return the sizes of a tower's part for pictures and frames, and their tokens."""
    if most is not None:
        rule = msgspec.structs.replace(rule, high=min(rule.high, most)) if rule.kind == "area" else rule
    cuts = [
        (n, cut(rule, *_smaller(w, h, most))) for n, w, h in (read_pictures(pictures, "pictures") if pictures else ())
    ]
    for frames, width, height in read_pictures(video, "video") if video else ():
        own = rule
        if rule.volume[1]:
            low, high = (each / frames for each in rule.volume)
            own = msgspec.structs.replace(rule, low=low, high=high if most is None else min(high, most))
        cuts.append((ceil(frames / rule.frames), frame(own, *_smaller(width, height, most))))
    each = {
        "tiles": sum(count * seen.tiles for count, seen in cuts),
        "patches": sum(count * seen.tiles * seen.patches for count, seen in cuts),
        "pairs": sum(count * seen.tiles * seen.patches**2 for count, seen in cuts),
    }
    if rule.kind == "edge":  # they lie side by side in one sequence, and a mask parts them
        rows = [seen.tokens - seen.patches // rule.merge**2 for _, seen in cuts]
        columns = [seen.patches // (rule.merge**2 * row) for row, (_, seen) in zip(rows, cuts, strict=True)]
        padded = sum(count for count, _ in cuts) * max(rows) * max(columns) * rule.merge**2
        each |= {"tiles": 1, "pairs": each["patches"] ** 2, "padded": padded}
    return each, sum(count * seen.tokens for count, seen in cuts)


FRAMES = 100
"""Of a spectrum, a second (Whisper's hop of 160 samples at 16,000)."""


def heard(rule: Rule, seconds: float) -> tuple[dict[str, Any], int]:
    """Return the sizes of a tower's part for a sound, and its tokens. Raises `ConfigError` for one whose end would be cut off.

    >>> heard(Rule(kind="windows", patch=2, merge=4, tile=3000), 40)
    ({'tiles': 2, 'patches': 3000, 'pairs': 4500000}, 750)
    """
    frames = ceil(round(FRAMES * seconds, 6))
    halved = (frames - 1) // 2 + 1
    tokens = (halved - 2) // 2 + 1  # as `_get_feat_extract_output_lengths` of Qwen's towers has them
    side = rule.tile // rule.patch
    if rule.kind == "chunks":  # each attends to itself, and the last is shorter
        side = rule.tile
        sizes = [side] * (frames // (2 * side)) + [ceil(frames % (2 * side) / 2)]
        own = [size for size in sizes if size]
        return {"tiles": len(own), "patches": sum(own), "pairs": sum(size**2 for size in own)}, tokens
    windows = ceil(frames / rule.tile)
    if rule.kind == "padded" and windows > 1:
        raise ConfigError(f"{seconds:g} s: its end is cut off after {rule.tile // FRAMES} s", key="audio")
    tokens = tokens if rule.kind == "padded" else windows * side // rule.merge
    return {"tiles": windows, "patches": windows * side, "pairs": windows * side**2}, tokens


def _smaller(width: int, height: int, most: int | None) -> tuple[int, int]:
    """A picture made smaller until it has `most` pixels, as tools do before the processor sees it."""
    share = 1.0 if most is None else max(1.0, sqrt(width * height / most))
    return max(1, int(width / share)), max(1, int(height / share))


def _before(model: ModelSpec, layers: list[Block], reached: bool, adapts: bool) -> ModelSpec:
    """The model with layers of a tower before its own. The first and last of its distinct blocks stay where they are."""
    own = [msgspec.structs.replace(block, reached=True) if reached else block for block in model.blocks]
    pattern = list(model.pattern)
    first = own[pattern[0]]
    if adapts and not reached and first.reached:
        own.insert(1, msgspec.structs.replace(first, reached=False))
        pattern = [1, *(kind + (kind > 0) for kind in pattern[1:])]
    distinct = list(dict.fromkeys(layers))
    blocks = (own[0], *distinct, *(own[1:] or own))
    shifted = tuple(kind + len(distinct) if kind else 0 for kind in pattern)
    before = tuple(1 + distinct.index(block) for block in layers)
    return msgspec.structs.replace(
        model,
        blocks=blocks,
        pattern=before + shifted,
        reached=model.reached or reached,
    )


def without_pictures(model: ModelSpec) -> ModelSpec:
    """Return the language model alone, as `with_pictures` had it."""
    own = [block for block in model.blocks if block.tower is None]
    if len(own) == len(model.blocks):
        return model
    distinct = list(dict.fromkeys(msgspec.structs.replace(block, reached=True) for block in own))
    pattern = [msgspec.structs.replace(model.blocks[kind], reached=True) for kind in model.pattern]
    return msgspec.structs.replace(
        model, blocks=tuple(distinct), pattern=tuple(distinct.index(block) for block in pattern if block.tower is None)
    )


def stated(job: Job) -> str:
    """Return the pictures of a job's sequences, made smaller where it says so, as text. Raises `NotModelled` for a video.

    >>> stated(Job(model="", seq_len=8, pictures="2x1024x768,64x64", max_pixels=196608))
    '2x512x384,1x64x64'
    """
    if job.video is not None:
        raise NotModelled("a video in a captured model: --pictures has its frames")
    each = read_pictures(job.pictures, "pictures") if job.pictures else ()
    return ",".join("x".join(map(str, (n, *_smaller(w, h, job.max_pixels)))) for n, w, h in each)


def tokens_of(job: Job, model: ModelSpec) -> int:
    """Return the tokens of a sequence that its pictures, frames and sound are; 0 where no layers of their tower are written."""
    if unwritten(job, model) or not any(asked for *_, asked in _asked(job)):
        return 0
    return with_pictures(model, job.pictures or "", job.video or "", "frozen", True, job.max_pixels, job.audio).tokens


def unwritten(job: Job, model: ModelSpec) -> str:
    """Return the section of a config that a job's pictures or sounds are of, where no layers of it are written; else ""."""
    named = {tower.name.rpartition(".")[2]: bool(tower.layers) for tower in model.towers}
    return next((section for _, section, asked in _asked(job) if asked and not named.get(section)), "")


def _asked(job: Job) -> tuple[tuple[str, str, bool], ...]:
    """Fields of a job that a tower sees or hears, the tower's section of a config, and whether the job has them."""
    seen = "pictures" if job.pictures else "video"
    return (seen, "vision_config", bool(job.pictures or job.video)), ("audio", "audio_config", job.audio is not None)


def seeing(
    job: Job, model: ModelSpec, degrees: dict[str, int], seq_len: int, fill: Any, assumed: dict[str, str], file: str
) -> ModelSpec:
    """Return the model with its tower, where a job has pictures or a video. Raises `ConfigError` or `NotModelled`."""
    sound = None if model.own.names else job.audio
    if job.pictures is None and job.video is None:
        for name in ("tower", "max_pixels")[sound is not None :]:
            if getattr(job, name) is not None and not file:  # a tool's file says it whatever its data is
                raise ConfigError("needs --pictures or --video", key=name)
        if sound is None:
            return model
    if model.own.library:
        return model  # its latents are of these sizes
    if not model.own.rewritten:
        return model  # as its processor makes them
    if degrees["pp"] > 1 or degrees["cp"] > 1:
        raise NotModelled(
            "pictures or sounds over pipeline stages or context-parallel ranks: --tp, --zero and --gpus go with them"
        )
    if job.tower == "adapters" and not job.adapts:
        raise ConfigError("adapters: needs --lora-rank or --qlora", key="tower")
    left = [_tower(model, key, section) for key, section, asked in _asked(job) if asked]
    if not all(tower.layers for tower in left):
        assumed[f"{'pictures' if job.pictures or job.video else 'sound'} of a sequence"] = (
            f"the layers of its {unwritten(job, model)} are not known here: it is left out, and its tokens are among --seq-len"
        )
        return model
    how = fill(
        "tower", "frozen" if job.adapts else "trained", "as the language model alone has adapters" if job.adapts else ""
    )
    masks = job.attention in (None, "flash", "eager")
    seen = with_pictures(model, job.pictures or "", job.video or "", how, job.adapts, job.max_pixels, sound, masks)
    shown = "audio" if sound is not None else "pictures" if job.pictures else "video"
    if seen.tokens > seq_len:
        raise ConfigError(
            f"are {seen.tokens:,} tokens of each sequence, which has --seq-len {seq_len:,}",
            key=shown,
        )
    assumed[f"{'sound' if shown == 'audio' else 'pictures'} of a sequence"] = (
        f"{seen.words} of {seq_len:,} (by the limits of the published processor)"
    )
    return seen.model

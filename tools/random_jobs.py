"""Random command lines of this tool, for `compare_answers.py`: often valid, and the same for the same seed and names.

A maker writes one command line of a command, without --json. Its files lie beside it (`write_files`): the job files of the
repository's examples and of its tests, and texts of errors with random figures.
"""

from __future__ import annotations

import ast
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "loss", "transient", "outside", "evaluation")
LANES = ("flops", "time", "mfu", "network", "verdict", "forward", "backward", "recompute", "matmul", "optimizer-time")
FRAMEWORKS = ("huggingface", "deepspeed", "torchtitan", "megatron")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev")
OPTIMIZERS = (
    "adamw-8bit",
    "adafactor",
    "muon",
    "lion",
    "sgd-momentum",
    "sgd",
    "paged-adamw-8bit",
    "galore",
    "adam-mini",
)
PRECISIONS = ("bf16", "fp16", "fp32", "bf16-pure", "bf16-autocast", "fp8", "mxfp8")
PAIRED = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "rm", "sft", "gkd")
ROLLOUTS = ("grpo", "rloo", "dapo", "gspo", "ppo", "opd")
TEXTS = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "gemma-2-9b",
)
"""Models of text, of which a run after pre-training is likely to be modelled."""
SMALL = ("gpt2", "qwen2.5-0.5b")
"""Models whose code is soon captured."""
CARDS = ("h100-sxm5-80gb", "a100-sxm4-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "rtx4090")
DIALECTS = (
    "megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "transformers", "trl", "axolotl", "llamafactory",
    "verl", "torchtune", "litgpt", "ms-swift", "automodel", "unsloth", "peft", "openrlhf", "nemo-rl", "slime", "prime-rl", "flags",
)  # fmt: skip
SAVED = (
    "torch.nn.Sigmoid()(x)", "(x + 1) * (y + 1)", "F.dropout(x)", "F.silu(x) * y", "torch.softmax(x @ y, -1)",
)  # fmt: skip
TOKENS = ("--tokens", "10M")
"""Of jobs that are checked: `loadgauge.toml` gives them a price, which is of a whole run."""
ERRORS = 40
"""How many texts of errors are made."""


class Names(NamedTuple):
    """What the jobs may name: all of the older tree, so that both know it."""

    models: list[str]
    gpus: list[str]
    quantities: list[str]
    sources: list[str]
    files: list[str]
    checked: list[str]
    errors: list[str]
    torch: bool


class Line:
    """A command line in the making."""

    def __init__(self, pick: random.Random, *words: object) -> None:
        self.pick = pick
        self.words = [str(word) for word in words]

    def add(self, *words: object) -> None:
        """Append words."""
        self.words.extend(str(word) for word in words)

    def sometimes(self, share: float, *words: object) -> None:
        """Append words in that share of the jobs."""
        if self.pick.random() < share:
            self.add(*words)

    def choice(self, share: float, flag: str, *values: object) -> None:
        """Append a flag with one of its values in that share of the jobs."""
        if self.pick.random() < share:
            self.add(flag, self.pick.choice(values))

    def __str__(self) -> str:
        return shlex.join(self.words)


# -- a run's flags ------------------------------------------------------------------------------------------------------


def run_flags(line: Line, names: Names, most: int = 24) -> None:
    """Append model, card and run, over at most so many data-parallel ranks."""
    pick, sometimes, choice = line.pick, line.sometimes, line.choice
    line.add(pick.choice(names.models), "--gpu", pick.choice(names.gpus))
    framework = pick.choice(FRAMEWORKS)
    line.add("--framework", framework)  # which framework is the default is a choice of the tree's own
    megatron = framework == "megatron"
    tp = pick.choice((1, 1, 2, 4, 8)) if megatron else pick.choice((1, 1, 1, 2, 4))
    pp = pick.choice((1, 1, 1, 2, 4))
    cp = pick.choice((1, 1, 1, 1, 2, 4))
    dp = pick.choice([ranks for ranks in (1, 2, 4, 8, 16, 24) if ranks <= most])
    micro = pick.choice((1, 1, 2, 4))
    batches = pick.choice((1, 2, 4, 8, 16))
    for name, degree in (("tp", tp), ("pp", pp), ("cp", cp)):
        sometimes(float(degree > 1), f"--{name}", degree)
    line.add("--gpus", tp * pp * cp * dp)
    sometimes(0.9, "--micro-batch", micro)
    sometimes(0.8, "--global-batch", micro * dp * batches)
    if pick.random() < 0.9:
        line.add("--seq-len", pick.choice((512, 1024, 2048, 4096, 8192)))
    else:
        sometimes(0.7, "--lengths", "uniform:2048", "--padding", pick.choice(("free", "dynamic", "max-length")))
    choice(0.2, "--ep", 2, 4, 8)
    sometimes(0.05, "--etp", 2)
    sometimes(0.7 if tp > 1 else 0, "--sequence-parallel")
    if pp > 1:
        schedule = pick.choice(SCHEDULES)
        sometimes(0.5, "--schedule", schedule, *(("--vpp", 2) if schedule == "interleaved" else ()))
    choice(0.3 if cp > 1 else 0, "--cp-comm", "ring", "all_to_all", "all_gather")
    choice(0.7, "--zero", 0, 1, 2, 3)
    sometimes(0.1 if dp % 2 == 0 else 0, "--replicas", 2)
    choice(0.5, "--recompute", "selective", "full", "full:every=2", "full:layers=3", "full:group=2")
    choice(0.3, "--optimizer", *OPTIMIZERS)
    choice(0.4, "--precision", *PRECISIONS)
    choice(0.2, "--attention", "flash", "eager")
    choice(0.3, "--loss", "float32", "inplace", "chunked", "chunked:16", "liger")
    adapters = (("--lora-rank", 16), ("--qlora",), ("--lora-rank", 8, "--lora-targets", "attention"))
    sometimes(0.2, *pick.choice((*adapters, ("--train", "layers.-2:"), ("--lora-rank", 8, "--use-dora"))))
    choice(0.1, "--offload", "optimizer", "all")
    choice(0.05, "--activation-offload", "checkpoints", "all")
    choice(0.05, "--eval-batch", 1, 8)
    sometimes(0.05, "--compile")
    choice(0.3, "--overlap", "none", "all", "dp,tp", "ep,pp", "prefetch,cp")
    choice(0.1, "--order", "tp,cp,dp,pp", "tp,dp,cp,pp", "tp,cp,pp,dp")
    sometimes(0.1, "--mtp")
    sometimes(0.1, "--expert-imbalance", 1.5)
    choice(0.2, "--nic-bandwidth", "12.5GB/s", "400Gbit/s")
    choice(0.1, "--gpus-per-node", 4, 8, 16)
    choice(0.05, "--topology", "rail", "fat-tree-4to1", "dragonfly")


def text_model(line: Line, names: Names) -> str:
    """A well-known model of text that the tree has."""
    return line.pick.choice([model for model in TEXTS if model in names.models] or names.models)


def card(line: Line, names: Names) -> str:
    """A well-known card that the tree has."""
    return line.pick.choice([gpu for gpu in CARDS if gpu in names.gpus] or names.gpus)


def rollout_flags(line: Line) -> None:
    """Append what a step of prompts, answers and updates is."""
    pick = line.pick
    line.add("--prompts", pick.choice((16, 32, 64)), "--samples", pick.choice((4, 8, 16)))
    line.add("--prompt-len", pick.choice((256, 512, 1024)))
    line.add("--answers", pick.choice((1024, "uniform:2048", "exp:1000,4096", "lognormal:800,0.6,4096")))


# -- makers, a command each ---------------------------------------------------------------------------------------------


def estimate(line: Line, names: Names) -> None:
    """Does it fit, with one further question."""
    if line.pick.random() < 0.1:
        line.add("--size", line.pick.choice(("1B", "7B", "30B")), "--family", line.pick.choice(("gpt", "llama")))
        line.add("--gpus", 8, "--zero", line.pick.choice((1, 2, 3)), "--memory", line.pick.choice(("24GiB", "80GiB")))
    elif line.pick.random() < 0.1 and names.files:
        line.add(line.pick.choice(names.files), "--gpu", card(line, names))
    else:
        run_flags(line, names)
        whole = ("--tokens", "20B", "--price", 2.5, "--days", 30, "--mtbf-hours", 50000)
        line.sometimes(0.3, *line.pick.choice((("--tokens", "1T"), whole)))
    kind = line.pick.random()
    if kind < 0.5:
        line.choice(0.9, "--explain", *PARTS, *LANES)
    elif kind < 0.65:
        line.add("--table", line.pick.choice(("operations", "weights", "flops", "activations")))
        line.sometimes(0.3, "--csv")
    elif kind < 0.75:
        line.add(
            "--sweep", line.pick.choice(("tokens=1T,2T", "attention=flash,eager", "zero=0..3", "optimizer=adamw,sgd"))
        )
        line.sometimes(0.2, "--csv")
    elif kind < 0.85:
        line.add("--brief")
    else:
        line.choice(0.2, "--counter", "allocated", "active", "reserved", "nvidia-smi")


def post_training(line: Line, names: Names) -> None:
    """An estimate of a task after pre-training."""
    pick = line.pick
    task = pick.choice(PAIRED + ROLLOUTS)
    model = text_model(line, names)
    line.add(model, "--gpu", card(line, names), "--gpus", pick.choice((1, 2, 4, 8, 16)), "--task", task)
    line.choice(0.8, "--zero", 0, 2, 3)
    line.choice(0.7, "--micro-batch", 1, 2, 4)
    line.choice(0.4, "--recompute", "full", "selective")
    line.sometimes(0.3, *pick.choice((("--lora-rank", 16), ("--qlora",))))
    if task in ("gkd", "opd"):
        line.add("--teacher", pick.choice((model, "llama-3.1-70b", "qwen2.5-32b")))
    if task == "ppo":
        line.choice(0.6, "--critic", "shared", model)
        line.choice(0.4, "--reward-model", model)
    if task in ROLLOUTS:
        rollout_flags(line)
        tp = pick.choice((1, 1, 2))
        line.sometimes(
            0.8, "--rollout", pick.choice((f"vllm:tp={tp},utilization=0.6,sleep=1", f"sglang:tp={tp}", "vllm", "hf"))
        )
        line.choice(0.2, "--epochs", 2)
        line.choice(0.3, "--reference", "model", "none", "adapter-off")
        line.choice(0.2, "--rollout-offload", "all", "optimizer")
        line.choice(0.5, "--explain", "kv", "logprobs", "sync", "tail")
    else:
        line.add("--seq-len", pick.choice((1024, 2048, 4096)))
        line.choice(0.3, "--reference", "model", "none", "precomputed", "adapter-off")
        line.choice(0.2, "--loss", "chunked", "liger", "tiled")


def inference(line: Line, names: Names) -> None:
    """An estimate of generation or scoring."""
    pick, tp = line.pick, line.pick.choice((1, 1, 2, 4, 8))
    task = pick.choice(("generate", "generate", "forward"))
    model = text_model(line, names) if pick.random() < 0.5 else pick.choice(names.models)
    line.add(model, "--gpu", card(line, names), "--gpus", tp, "--tp", tp, "--task", task)
    line.add("--context", pick.choice((512, 2048, 8192)), "--batch", pick.choice((1, 8, 64)))
    line.choice(0.3, "--weight-format", "fp8", "nf4", "gptq", "awq")
    line.choice(0.2, "--prefill-tokens", 2048)
    if task == "generate":
        line.choice(0.5, "--answer", 1, 128, 256)
        line.choice(0.3, "--server", "vllm", "sglang", "trtllm")
        line.choice(0.3, "--cache-format", "fp8", "int8")


def captured(line: Line, names: Names) -> None:
    """An estimate of a model as its own code has it."""
    line.add(line.pick.choice(SMALL), "--road", "captured", "--gpu", card(line, names), "--gpus", 4)
    line.choice(0.9, "--seq-len", 256, 512, 1024)
    line.choice(0.7, "--micro-batch", 1, 2, 4)
    line.choice(0.7, "--zero", 1, 2, 3)
    line.choice(0.5, "--optimizer", "sgd", "adafactor")
    line.choice(0.3, "--recompute", "full")


def plan(line: Line, names: Names) -> None:
    """A search of a small space, or an inverse question."""
    pick = line.pick
    gpus = pick.choice((1, 2, 4, 8, 16))
    line.add(
        text_model(line, names), "--gpu", card(line, names), "--gpus", gpus, "--framework", pick.choice(FRAMEWORKS)
    )
    if pick.random() < 0.1:
        line.add("--task", "grpo", "--zero", 3)
        rollout_flags(line)
        return
    line.choice(0.7, "--tp", 1, min(2, gpus), "1,2")
    line.choice(0.6, "--pp", 1, "1,2")
    line.choice(0.5, "--zero", 1, 3, "2,3")
    line.choice(0.3, "--recompute", "none;full", "full")
    line.sometimes(0.2, "--qlora")
    find = pick.choice(("", "", "", "seq-len", "micro-batch", "gpus", "batch", "nic", "link", "tokens", "days"))
    line.add("--cp", 1, *(() if find == "seq-len" else ("--seq-len", pick.choice((2048, 4096)))))
    if find:
        line.add("--find", find)
        line.sometimes(float(find in ("batch", "nic", "link")), "--exposed", pick.choice((0.05, 0.2)))
        line.sometimes(float(find in ("tokens", "gpus")), "--days", 30)
        line.sometimes(float(find in ("days", "gpus")), "--tokens", "2B")
    line.sometimes(float(find not in ("batch", "micro-batch")), "--global-batch", pick.choice((32, 64)))
    if not find:
        line.choice(0.4, "--objective", "throughput", "gpus", "headroom", "network")
        line.sometimes(
            0.2, *pick.choice((("--why-not", "tp=2"), ("--what-next",), ("--export", "megatron"), ("--top", 2)))
        )


def network(line: Line, names: Names) -> None:
    """What the links must carry."""
    run_flags(line, names)
    line.choice(0.1, "--oversubscription", 2, 4)
    line.sometimes(0.1, "--rails", "--pod", 32)


def fleet(line: Line, names: Names) -> None:
    """A whole run, of few simulations."""
    pick, tp = line.pick, line.pick.choice((1, 2, 8))
    line.add(
        text_model(line, names),
        "--gpu",
        card(line, names),
        "--gpus",
        pick.choice((64, 256, 1024)),
        "--framework",
        "megatron",
    )
    line.add("--tp", tp, "--zero", pick.choice((1, 3)), "--global-batch", 1024, "--tokens", pick.choice(("100B", "1T")))
    line.add("--runs", 20, "--seed", pick.randrange(100))
    line.choice(0.4, "--failures", "llama3", "studies")
    line.choice(0.4, "--spares", "2%", 1)
    line.choice(0.4, "--checkpoint", "sync:1h", "async:10min", "memory:5min")
    line.choice(0.2, "--recover", "restart", "elastic", "reroute")
    line.choice(0.1, "--sites", 2)
    questions = (
        ("--find", "checkpoint-interval"),
        ("--find", "spares"),
        ("--explain", "goodput"),
        ("--explain", "failures"),
    )
    line.sometimes(0.5, *pick.choice((*questions, ("--what-if",))))


def convert(line: Line, names: Names) -> None:
    """A job file, or flags, as another tool's file."""
    pick = line.pick
    if names.files and pick.random() < 0.6:
        line.add(pick.choice(names.files))
        line.choice(0.2, "--gpus", 2, 8)
        line.choice(0.2, "--micro-batch", 1, 2)
    else:
        line.add(text_model(line, names), "--gpus", pick.choice((1, 2, 8)), "--seq-len", pick.choice((1024, 4096)))
        line.choice(0.7, "--zero", 0, 2, 3)
        line.choice(0.5, "--micro-batch", 1, 2)
        line.choice(0.3, "--task", *PAIRED[:8])
        line.choice(0.4, "--optimizer", "adamw-8bit", "adafactor", "paged-adamw-8bit", "muon")
        line.sometimes(0.3, *pick.choice((("--lora-rank", 16), ("--qlora",), ("--tp", 2))))
        line.choice(0.3, "--recompute", "full", "selective")
        line.choice(0.2, "--attention", "flash", "eager")
    line.add("--to", pick.choice(DIALECTS))


def why(line: Line, names: Names) -> None:
    """What held the memory, by an error's text."""
    line.add(line.pick.choice(names.errors))
    if line.pick.random() < 0.4:
        line.add("--model", text_model(line, names), "--gpu", card(line, names))
        line.choice(0.8, "--gpus", 1, 8)
        line.choice(0.6, "--zero", 2, 3)
        line.choice(0.7, "--seq-len", 2048, 8192)
        line.choice(0.5, "--micro-batch", 1, 4)
        line.sometimes(0.3, "--qlora")


def check(line: Line, names: Names) -> None:
    """Whether job files stay within a budget."""
    pick = line.pick
    if pick.random() < 0.1:
        return
    line.add(*pick.sample(names.checked, pick.choice((1, 1, 2))), "--gpu", card(line, names), *TOKENS)
    line.sometimes(0.5, *pick.choice((
        ("--budget", "memory=22GiB"), ("--budget", "step=10s,memory=60GiB"), ("--budget", "growth=5%", "--against", "."),
        ("--price", 2, "--budget", "cost=50"),
    )))  # fmt: skip
    line.sometimes(0.2, "--markdown")


def equation(line: Line, names: Names) -> None:
    """A closed form."""
    quantity = line.pick.choice(names.quantities)
    line.add(quantity)
    line.choice(0.4, "--layer", "gpt", "llama", "mixtral", "deepseek", *TEXTS[:2])
    line.sometimes(0.2, "--tp")
    line.sometimes(0.1, "--sequence-parallel")
    line.choice(0.2, "--recompute", "selective", "full")
    line.choice(0.2, "--attention", "eager", "flash")
    line.choice(0.3 if quantity == "states" else 0, "--zero", 1, 3)
    line.sometimes(0.1, "--latex")


def shown(line: Line, names: Names) -> None:
    """A catalogue, or a table as printed."""
    pick = line.pick
    line.words = [pick.choice(("article", "article", "models", "gpus", "completion", "validate"))]
    command = line.words[0]
    if command == "article":
        line.add(pick.choice((1, 2, 3, 4, 5) if names.torch else (1, 2, 3, 4)))
        line.sometimes(0.2, "--csv")
    elif command == "validate":
        line.add("--source", pick.choice(names.sources))
        line.sometimes(0.5, "--rows")
    elif command == "completion":
        line.add(pick.choice(("bash", "zsh", "fish")))
    else:
        line.add(*pick.choice(((), ("llama",), ("qwen",)) if command == "models" else ((), ("h100",), ("RTX 3080",))))


def saved(line: Line, names: Names) -> None:
    """What an expression keeps for backward."""
    line.add(line.pick.choice(SAVED))
    line.choice(0.4, "--dtype", "bfloat16", "float16", "float64")
    line.choice(0.4, "--constant", "x", "y")
    line.sometimes(0.3, "--device", "cuda")


class Maker(NamedTuple):
    """Who writes a command's jobs: the command, how many of a thousand, and whether PyTorch must be there."""

    command: str
    weight: int
    write: Callable[[Line, Names], None]
    torch: bool = False


MAKERS = (
    Maker("estimate", 350, estimate),
    Maker("estimate", 120, post_training),
    Maker("estimate", 80, inference),
    Maker("estimate", 20, captured, torch=True),
    Maker("plan", 30, plan),
    Maker("network", 120, network),
    Maker("fleet", 30, fleet),
    Maker("convert", 90, convert),
    Maker("why", 60, why),
    Maker("check", 30, check),
    Maker("equation", 60, equation),
    Maker("article", 30, shown),
    Maker("saved", 10, saved, torch=True),
)
"""All commands but those that measure, trace or serve. Plans are few: each takes as long as a hundred estimates."""


def makers(names: Names, only: str = "") -> list[Maker]:
    """Those that can be answered. only: of this command, or this maker alone (`post_training`)"""
    able = [maker for maker in MAKERS if names.torch or not maker.torch]
    wanted = [maker for maker in able if only in ("", maker.command, maker.write.__name__)]
    if not wanted:
        raise SystemExit(f"--only {only}: is none of {', '.join(dict.fromkeys(maker.command for maker in able))},"
                         f" {', '.join(maker.write.__name__ for maker in able)}")  # fmt: skip
    return wanted


def job(pick: random.Random, names: Names, maker: Maker) -> str:
    """One random command line of a maker."""
    line = Line(pick, maker.command)
    maker.write(line, names)
    return str(line)


# -- files that jobs name -------------------------------------------------------------------------------------------------


def write_files(tree: Path, folder: Path, pick: random.Random) -> tuple[list[str], list[str]]:
    """Write what jobs read: names of files that may be job files, of the tree's examples and tests, and of texts of errors."""
    for file in sorted((tree / "examples").glob("*.*")):
        shutil.copy(file, folder)
    jobs = [file.name for file in sorted(folder.iterdir()) if file.suffix in (".yaml", ".json", ".sh", ".py")]
    for file in sorted((tree / "tests").glob("**/test_formats_*.py"), key=lambda file: file.name):
        for text in dict.fromkeys(texts(file)):
            name = f"job-{len(jobs)}.{ending(text)}"
            (folder / name).write_text(text, encoding="utf-8")
            jobs.append(name)
    errors = [f"error-{number}.txt" for number in range(ERRORS)]
    for name in errors:
        (folder / name).write_text(error_text(pick), encoding="utf-8")
    return jobs, errors


def texts(file: Path) -> list[str]:
    """The strings of several lines in a Python file, which no function or class has as its docstring."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in strings if isinstance(node.value, str) and node.value.count("\n") > 2]


def ending(text: str) -> str:
    """The ending of a file's name, by what it holds."""
    if text.lstrip().startswith("{"):
        return "json"
    patterns = {
        "sh": r"^(#!|torchrun |python |accelerate |deepspeed |swift )", "py": r"^(import|from) ", "toml": r"^\[",
    }  # fmt: skip
    return next((name for name, pattern in patterns.items() if re.search(pattern, text, re.MULTILINE)), "yaml")


FRAMES = (
    ("/env/torch/autograd/graph.py", "_engine_run_backward", "return Variable._execution_engine.run_backward("),
    ("/env/transformers/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()"),
    ("/env/torch/optim/adamw.py", "_multi_tensor_adamw", "exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)"),
    ("/env/torch/optim/adam.py", "_init_group", "state['exp_avg'] = torch.zeros_like(p)"),
    ("/env/transformers/models/llama/modeling_llama.py", "forward", "down_proj = self.down_proj(self.act_fn(x) * self.up_proj(x))"),
    ("/env/transformers/integrations/sdpa_attention.py", "eager_attention_forward", "attn = torch.matmul(query, key)"),
    ("/env/transformers/modeling_utils.py", "from_pretrained", "model = cls(config)"),
)  # fmt: skip


def error_text(pick: random.Random) -> str:
    """An out-of-memory error of random figures, below a traceback in most."""
    total = pick.choice((23.64, 39.38, 79.11, 139.72))
    tried = round(pick.choice((0.1, 1, 4, 100)) * pick.uniform(0.2, 1), 2)
    free = round(pick.uniform(0, 3), 2)
    beside, idle = round(pick.uniform(0.3, 4), 2), round(pick.choice((0.2, 1, 8)) * pick.random(), 2)
    process = round(total - free - pick.choice((0, 0, 0.2 * total)), 2)
    allocated = round(max(process - beside - idle, 0.1), 2)
    error = pick.choice((
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB. GPU 0 has a total capacity of {total} GiB of"
        f" which {free} GiB is free. Including non-PyTorch memory, this process has {process} GiB memory in use. Of the allocated"
        f" memory {allocated} GiB is allocated by PyTorch, and {idle} GiB is reserved by PyTorch but unallocated.",
        f"RuntimeError: CUDA out of memory. Tried to allocate {tried} GiB (GPU 0; {total} GiB total capacity; {allocated} GiB"
        f" already allocated; {free} GiB free; {process} GiB reserved in total by PyTorch)",
        f"torch.OutOfMemoryError: HIP out of memory. Tried to allocate {tried} GiB. GPU 0 has a total capacity of {total} GiB of"
        f" which {free} GiB is free. Of the allocated memory {allocated} GiB is allocated by PyTorch, and {idle} GiB is reserved"
        " by PyTorch but unallocated.",
        f"RuntimeError: MPS backend out of memory (MPS allocated: {allocated} GB, other allocations: {beside} GB, max allowed:"
        f" {total} GB). Tried to allocate {tried} GB on private pool.",
        f"RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        f" allocate {round(tried * 2**30)} bytes. Error code 12 (Cannot allocate memory)",
        "RuntimeError: CUDA error: out of memory",
    ))  # fmt: skip
    frames = [("train.py", "<module>", "trainer.train()"), *pick.sample(FRAMES, pick.choice((0, 1, 1, 2)))]
    called = [
        f'  File "{file}", line {pick.randrange(10, 900)}, in {name}\n    {code}\n' for file, name, code in frames
    ]
    return "".join(["Traceback (most recent call last):\n", *called, error, "\n"])

"""Words of sentences that say nothing by themselves, values with their units, and spellings of the parts of flags."""

BETWEEN = ("on", "with", "using", "for", "in", "at", "of", "to", "by", "and")
"""Words between two things, which are no names of flags in a sentence."""
FILLERS = (
    *BETWEEN, "gpu", "gpus", "card", "cards", "a", "an", "one", "the", "my", "single", "of",
    "to", "and", "by", "i", "we", "it", "this", "can", "could", "will", "would", "does", "do", "is", "are", "what", "how",
    "much", "many", "long", "need", "needs", "take", "takes", "require", "requires", "run", "running", "train", "training",
    "finetune", "finetuning", "fine-tune", "fine-tuning", "fit", "fits", "pretrain", "pretraining", "estimate", "vram",
    "memory", "please", "big", "large", "model", "from", "scratch", "per", "each",
    "there", "best", "layout", "optimize", "optimise", "search", "tune", "cost", "price", "time", "size",
)  # fmt: skip
"""Words of a sentence that say nothing by themselves."""
NUMBERS = {"two": "2", "three": "3", "four": "4", "six": "6", "eight": "8", "ten": "10", "sixteen": "16"}
"""Numbers that are written in letters."""
DAYS = {"h": 1 / 24, "d": 1, "w": 7, "m": 30}
"""Days of a unit of time, by its first letter."""
UNITS = (
    (r"\d+k", "--seq-len"),
    (r"\d[\d.]* ?(?:d(?:ays?)?|w(?:eeks?)?|months?|h(?:ours?)?)", "--days"),
    (r"[$€£¥] ?\d[\d.]*(?: ?(?:/|per|an?) ?(?:gpu)?[- /]?h(?:ou)?r?)?", "--price"),
    (r"\d[\d.]* ?(?:[$€£¥]|usd|eur|dollars?|euros?)? ?(?:/|per|an?) ?(?:gpu)?[- /]?h(?:ou)?r?", "--price"),
    (r"\d[\d.]* ?g(?:b|bit)?(?:ps|/s)", "--nic-bandwidth"),
)
"""Values with their units, in whose figures a sentence has them, and the flag of each."""

PARTS = {
    **dict.fromkeys(("use", "enable", "do", "with", "the", "of", "is", "size", "degree"), ""),
    "sequence": "seq", **dict.fromkeys(("len", "lengths"), "length"),
    **dict.fromkeys(("seqlen", "seqlength"), "seq length"), **dict.fromkeys(("parallelism", "parallelization", "par"), "parallel"),
    **dict.fromkeys(("gradient", "gradients", "grads"), "grad"), **dict.fromkeys(("accumulation", "accumulate", "acc"), "accum"),
    **dict.fromkeys(("checkpointing", "checkpoints", "ckpt", "ckpting"), "checkpoint"),
    **dict.fromkeys(("activations", "act", "acts"), "activation"), **dict.fromkeys(("optimiser", "optim", "opt"), "optimizer"),
    **dict.fromkeys(("number", "n", "count"), "num"), **dict.fromkeys(("gpus", "device", "devices", "accelerator"), "gpu"),
    **dict.fromkeys(("attn", "attentions"), "attention"), **dict.fromkeys(("implementation", "backend"), "impl"),
    **dict.fromkeys(("mem", "vram"), "memory"), **dict.fromkeys(("bs", "bsz", "batches"), "batch"),
    **dict.fromkeys(("quantization", "quantize", "quantisation"), "quant"), **dict.fromkeys(("tokens", "tok", "toks"), "token"),
    **dict.fromkeys(("bw",), "bandwidth"), **dict.fromkeys(("learning",), ""), "lr": "rate", "wd": "decay weight",
    **dict.fromkeys(("tensor", "tp"), "tensor"), **dict.fromkeys(("machines", "hosts", "node"), "nodes"), "dtypes": "dtype",
    **dict.fromkeys(("steps", "step"), "step"), "maximum": "max", "microbatch": "micro batch", "batchsize": "batch",
    "clipping": "clip", "val": "value", "nproc": "num gpu", "procs": "gpu",
}  # fmt: skip
"""Parts of names in another spelling, and those that say nothing."""
NEGATIONS = r"(?:no|disable|without|skip|not)-"
"""Pattern of what denies a switch."""

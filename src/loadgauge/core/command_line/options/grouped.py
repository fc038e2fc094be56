"""Help with headings: a command with many flags shows the first of them, and with `--help-all` all, under the groups of `Job`'s
fields."""

import click

from loadgauge.core.base.by_key import lists
from loadgauge.core.command_line.options.spoken import Spoken
from loadgauge.core.command_line.sizes import HELP as SIZES
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.serving.inference import fields as inference_fields
from loadgauge.core.text.language import said

TITLES = {
    "model": "Model", "file": "Job files", "method": "Method", "batch": "Batch and data", "layout": "Layout",
    "cluster": "GPU and cluster", "money": "Time and money", "posttrain": "After pre-training (--task grpo, dpo, ...)",
    "serving": "Serving (--task generate, forward)", "own": "The question", "output": "Output",
}  # fmt: skip
"""Headings, by the group of a flag, in order."""
OWN = (
    {"mfu": "money", "hfu": "money", "task": "posttrain", "model": "model", "family": "model"}
    | dict.fromkeys(("json", "csv", "markdown", "as_json", "as_markdown", "brief", "plot", "figure"), "output")
    | dict.fromkeys(("output", "timeline", "out", "sarif", "page"), "output")
    | dict.fromkeys(("max_ttft", "max_tpot", "requests"), "serving")
)
"""Groups of flags that are no fields of a job; all others are the command's own question."""
WORDS = {
    "gpu": "the card: 4090, h100, ... (list: loadgauge gpus)",
    "gpus": "how many GPUs (1)",
    "qlora": "adapters on a 4-bit base; --lora-rank 16: on the model",
    "micro_batch": "sequences at a time on one GPU (1)",
    "global_batch": "sequences of one optimizer step, over all GPUs",
    "seq_len": "tokens of a sequence (4096)",
    "zero": "0 to 3: what is sharded over GPUs; 3 is FSDP",
    "recompute": "none, selective, or full: gradient checkpointing",
    "framework": "whose defaults: trl, axolotl, unsloth, megatron, ...",
    "tokens": "of the whole run: adds days, and with --price money",
    "task": "grpo, dpo, ...: after pre-training; generate: to serve",
    "objective": "what is best: time, money, memory, network, ...",
    "find": "the most or least that will do: micro-batch, gpus, ...",
    "export": "write the best one as a job file of this tool",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "failures": "what fails how often: llama3, studies, none, 50000h",
    "share": "exposed traffic, as a share of compute time (0.05)",
    "topic": "the formula behind one axis: dp, tp, ...",
    "model": "what was trained: its changes are estimated too",
    "budget": "the most of memory, step, days, gpu-hours or cost",
    "against": "compare with a folder or a revision of git",
    "facts": "what a job file was read as, fact by fact",
    "rules": "only these rules; --rules lists them",
    "as_diff": "all of it mended, as a patch",
    "fix": "write that into the files",
    "price": "of one GPU-hour: what each change saves",
    "as_markdown": "a table for the summary of a pull request",
    "onto": "a file to patch; its comments and all else stay",
}
"""Texts of the first flags, each in one line."""
USUAL = ("gpu", "gpus", "qlora", "micro_batch", "seq_len", "zero", "recompute", "framework", "tokens", "task")
FIRST = {
    "plan": ("gpu", "gpus", "qlora", "seq_len", "global_batch", "framework", "objective", "find", "task", "export"),
    "fleet": ("gpu", "gpus", "tp", "pp", "zero", "global_batch", "tokens", "failures", "spares", "find"),
    "network": ("gpu", "gpus", "tp", "pp", "zero", "seq_len", "global_batch", "framework", "share", "topic"),
    "convert": ("target", "onto", "out", "gpus", "seq_len"),
    "check": ("gpu", "gpus", "budget", "against", "facts", "as_markdown"),
    "lint": ("gpu", "gpus", "rules", "as_diff", "fix", "tokens", "price"),
    "why": ("model", "gpu", "gpus", "qlora", "micro_batch", "seq_len", "zero", "recompute"),
    "evidence": ("gpu", "gpus", "zero", "micro_batch", "seq_len", "recompute", "step", "card", "allocated", "output"),
}
"""The ten flags, or fewer, that matter first, by command; `USUAL` for others."""
SHORT = "loadgauge.short"
"""Key of a context for the first screen alone."""


def group_of(option: click.Parameter) -> str:
    """Return the group of a flag: a key of `TITLES`."""
    name = str(option.name)
    if name in inference_fields():
        return "serving"
    if name in OWN or name.replace("_", "-") in SIZES:
        return OWN.get(name, "model")
    return fields()[name].group if name in fields() else "own"


def groups(command: click.Command) -> dict[str, list[click.Option]]:
    """Return the flags of a command that are shown, by the titles of their groups, in order."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    by_group = lists((group_of(each), each) for each in options)
    return {title: by_group[group] for group, title in TITLES.items() if group in by_group}


def _show_all(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.meta[SHORT] = False
        click.echo(ctx.get_help())
        ctx.exit()


class Grouped(Spoken):
    """A command whose flags have headings; `--help` shows the first ones on one screen, `--help-all` all of them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with `--help-all` before `--help`."""
        *own, last = super().get_params(ctx)
        more = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Every flag, by group.",
        )
        return [*own, more, last]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first screen: what is answered, an example, the first flags; or all, under headings."""
        if not ctx.meta.get(SHORT, True):
            super().format_help(ctx, formatter)
            return
        description, _, examples = (self.help or "").partition("\b\n")
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(description.partition("\n\n")[0])
        if (code := description.find("Exit code")) >= 0:
            formatter.write_paragraph()
            formatter.write_text(" ".join(description[code:].partition("\n\n")[0].split()))
        formatter.write_paragraph()
        first = [self.flag(name) for name in FIRST.get(str(self.name), USUAL)]
        with formatter.indentation():
            formatter.write_dl([self.record(option, ctx) for option in first if option is not None], col_max=24)
        formatter.write_paragraph()
        example = next(line for line in examples.splitlines() if line.strip().startswith("loadgauge"))
        formatter.write(f"{example.strip().rstrip(chr(92))}\n")
        count = sum(map(len, groups(self).values()))
        formatter.write(said(f"All {count} flags, under headings: {ctx.command_path} --help-all") + "\n")

    def flag(self, name: str) -> click.Option | None:
        """Return the flag of a name, if the command has it."""
        return next((each for each in self.params if isinstance(each, click.Option) and each.name == name), None)

    def record(self, option: click.Option, ctx: click.Context) -> tuple[str, str]:
        """Return the name of a flag with its value, and what it says on the first screen."""
        name = next(each for each in option.opts if each.startswith("--"))
        value = "" if option.is_flag else f" {option.metavar or ('N' if option.name in WORDS else 'NAME')}"
        return f"{name}{value}", WORDS.get(str(option.name), option.help or "")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every flag under the title of its group."""
        for title, options in groups(self).items():
            with formatter.section(title):
                formatter.write_dl([record for each in options if (record := each.get_help_record(ctx))])

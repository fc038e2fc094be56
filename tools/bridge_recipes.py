"""Writes `data/bridge_recipes.toml`, what Megatron-Bridge's recipes set: `python tools/bridge_recipes.py CHECKOUT COMMIT DATE`.

Its recipes are functions without arguments that assign literals; they are parsed, not run.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

KEPT = {
    "model.hf_model_id": "model", "model.tensor_model_parallel_size": "tp", "model.pipeline_model_parallel_size": "pp",
    "model.virtual_pipeline_model_parallel_size": "vpp", "model.context_parallel_size": "cp",
    "model.expert_model_parallel_size": "ep", "model.expert_tensor_parallel_size": "etp", "model.sequence_parallel": "sp",
    "model.seq_length": "length", "dataset.seq_length": "length", "train.micro_batch_size": "micro",
    "train.global_batch_size": "batch", "mixed_precision": "precision", "peft.dim": "rank",
    "peft.target_modules": "targets", "model.recompute_granularity": "recompute", "model.recompute_method": "method",
    "model.recompute_num_layers": "layers", "model.recompute_modules": "modules",
    "ddp.use_distributed_optimizer": "shared", "ddp.use_megatron_fsdp": "fsdp",
    "ddp.data_parallel_sharding_strategy": "strategy", "model.cross_entropy_loss_fusion": "fusion",
    "model.cross_entropy_fusion_impl": "impl", "model.num_layers_in_first_pipeline_stage": "first",
    "model.num_layers_in_last_pipeline_stage": "last", "optimizer.optimizer": "optimizer",
    "model.freeze_language_model": "frozen", "model.mtp_num_layers": "mtp",
    "optimizer.use_precision_aware_optimizer": "aware", "optimizer.main_grads_dtype": "grads",
    "optimizer.main_params_dtype": "params", "optimizer.exp_avg_dtype": "average", "optimizer.exp_avg_sq_dtype": "square",
    "mixed_precision.grad_reduce_in_fp32": "reduced", "ddp.overlap_grad_reduce": "grads_beside",
    "comm_overlap.tp_comm_overlap": "tp_beside", "comm_overlap.overlap_moe_expert_parallel_comm": "experts_beside",
}  # fmt: skip
"""Keys that are kept, and their names in the table."""
TOKENIZER = "tokenizer.tokenizer_model"
USUAL = {
    "reduced": True,
    "grads": "torch.float32",
    "params": "torch.float32",
    "average": "torch.float32",
    "square": "torch.float32",
    "optimizer": "adam",
}
"""Values that say nothing more than the recipe of precision does."""
FILE = "<file>"
"""Beside a function's names, those of its own file: two files may have a helper or a constant of one name."""


class Functions(dict[str, ast.FunctionDef]):
    """The functions of all files, and the names that some are imported under (`aliases`)."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.aliases: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.recipes: set[str] = set()
        self.files: dict[ast.FunctionDef, dict[str, Any]] = {}
        for path in sorted(root.rglob("*.py")):
            own: dict[str, Any] = {}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    self[node.name] = own[node.name] = node
                    self.files[node] = own
                    self.recipes |= {node.name} if path.parts[len(root.parts)] == "recipes" else set()
                elif isinstance(node, ast.ImportFrom):
                    renamed = {name.asname: name.name for name in node.names if name.asname}
                    self.aliases |= renamed
                    own |= renamed
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant) and target.id.isupper():
                        self.constants[target.id] = own[target.id] = node.value.value
                    elif isinstance(target, ast.Name) and isinstance(node.value, ast.Name):  # NAME = other_recipe
                        self.aliases[target.id] = node.value.id

    def named(self, name: str, local: dict[str, Any]) -> ast.FunctionDef | None:
        """The function that a name means in a file: its own, else the one that it imports, else one that any file has."""
        own = local.get(FILE, {}).get(name, name)
        return own if isinstance(own, ast.FunctionDef) else self.get(own) or self.get(self.aliases.get(name, name))

    def read(
        self, name: str, given: dict[str, Any] | None = None, depth: int = 0, local: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a recipe assigns, by key."""
        function = self.named(name, local or {})
        if function is None or depth > 5:
            return {}
        arguments = [*function.args.args, *function.args.kwonlyargs]
        defaults = [*function.args.defaults, *function.args.kw_defaults]
        local = {
            argument.arg: value.value
            for argument, value in zip(reversed(arguments), reversed(defaults), strict=False)
            if isinstance(value, ast.Constant)
        }
        state: dict[str, Any] = {}
        self._run(function.body, state, {FILE: self.files[function]} | local | (given or {}), depth)
        return state

    def _value(self, node: ast.expr, state: dict[str, Any], local: dict[str, Any]) -> Any:
        if isinstance(node, ast.Name):
            return local.get(node.id, local.get(FILE, {}).get(node.id, self.constants.get(node.id)))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("cfg."):
            return state.get(ast.unparse(node)[4:])
        if isinstance(node, ast.JoinedStr):
            parts = [self._value(part, state, local) for part in node.values]
            return "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
        if isinstance(node, ast.FormattedValue):
            return self._value(node.value, state, local)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = (self._value(side, state, local) for side in (node.left, node.right))
            return left * right if isinstance(left, int) and isinstance(right, int) else None
        try:
            return ast.literal_eval(node)
        except ValueError:
            return None

    def _run(self, body: list[ast.stmt], state: dict[str, Any], local: dict[str, Any], depth: int) -> None:
        for node in body:
            if isinstance(node, ast.If):
                self._run(node.body if self._holds(node.test, state, local) else node.orelse, state, local, depth)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                state |= self._call(node.value, state, local, depth)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                held = local.get(node.value.id)
                state |= held if isinstance(held, dict) else {}
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = ast.unparse(node.value.func)
                helper = self.named(called, local)
                if helper and node.value.args and ast.unparse(node.value.args[0]) == "cfg":
                    self._run(helper.body, state, self._arguments(node.value, state, local), depth + 1)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                self._assign(target, node.value, state, local, depth)

    def _holds(self, node: ast.expr, state: dict[str, Any], local: dict[str, Any]) -> bool:
        if isinstance(node, ast.BoolOp):
            parts = [self._holds(part, state, local) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.Call):  # isinstance(peft_scheme, str)
            return ast.unparse(node) == "isinstance(peft_scheme, str)"
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left = (
                node.left.func.value
                if isinstance(node.left, ast.Call) and isinstance(node.left.func, ast.Attribute)
                else node.left
            )
            first, second = self._value(left, state, local), self._value(node.comparators[0], state, local)
            if isinstance(node.ops[0], ast.In):
                return second is not None and first in second
            if isinstance(node.ops[0], ast.Gt):
                return first is not None and bool(first > second)
            return bool(first == second) == isinstance(node.ops[0], ast.Eq | ast.Is)
        return bool(self._value(node, state, local))

    def _arguments(self, call: ast.Call, state: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
        named = self.named(ast.unparse(call.func), local)
        names = [argument.arg for argument in named.args.args] if named else []
        given = {word.arg: self._value(word.value, state, local) for word in call.keywords if word.arg}
        given |= {FILE: self.files[named]} if named else {}
        return given | {name: self._value(value, state, local) for name, value in zip(names, call.args, strict=False)}

    def _call(self, call: ast.Call, state: dict[str, Any], local: dict[str, Any], depth: int) -> dict[str, Any]:
        name = ast.unparse(call.func)
        inner: dict[str, Any] = {}
        helper = self.named(name, local)
        if call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "cfg" and helper:
            self._run(helper.body, state, self._arguments(call, state, local), depth + 1)
        elif name == "ConfigContainer" or name.endswith("Provider"):
            for word in call.keywords:
                self._assign(f"cfg.{word.arg}", word.value, inner, local, depth)
        elif helper:
            inner = self.read(name, self._arguments(call, state, local), depth + 1, local)
        return inner

    def _assign(self, target: str, value: ast.expr, state: dict[str, Any], local: dict[str, Any], depth: int) -> None:
        if target == "cfg" and isinstance(value, ast.Call):
            state |= self._call(value, state, local, depth)
            return
        if target.startswith("(opt_cfg, "):  # `distributed_muon_with_cosine_annealing`, and the same of Adam
            local["opt_cfg"] = {"optimizer": "dist_muon" if "muon" in ast.unparse(value) else "adam"}
            return
        name, dot, attribute = target.partition(".")
        if isinstance(value, ast.Call):
            text, called = ast.unparse(value), ast.unparse(value.func)
            if "from_hf_pretrained(" in text:
                call = next(
                    n for n in ast.walk(value) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("pretrained")
                )
                result: Any = {"hf_model_id": self._value(call.args[0], state, local)}
            elif called.endswith("to_megatron_provider"):
                result = local.get(called.partition(".")[0])
            elif "peft_config" in called or called in ("LoRA", "DoRA", "VLMLoRA"):
                scheme = self._value(value.args[0], state, local) if value.args else called
                given = {word.arg: self._value(word.value, state, local) for word in value.keywords if word.arg}
                result = None if scheme is None else {"dim": 32, **given}
            elif target.endswith("mixed_precision") or "precision" in called:
                first = self._value(value.args[0], state, local) if value.args else called
                result = "bf16_mixed" if first == "MixedPrecisionConfig" else first
            elif self.named(called, local):
                result = self.read(called, self._arguments(value, state, local), depth + 1, local)
            else:
                result = {word.arg: self._value(word.value, state, local) for word in value.keywords if word.arg}
        else:
            result = self._value(value, state, local)
        if name != "cfg" and isinstance(local.get(name), dict) and dot:
            local[name][attribute] = result
        elif name != "cfg":
            local[target] = result
        elif isinstance(result, dict):
            if attribute in ("model", "dataset"):  # what was in its place is gone
                for key in [key for key in state if key.startswith(f"{attribute}.")]:
                    del state[key]
            state |= {f"{attribute}.{key}": inner for key, inner in result.items()}
        else:
            state[attribute] = result


def main(checkout: str, commit: str, date: str) -> str:
    """The table as TOML."""
    functions = Functions(Path(checkout) / "src/megatron/bridge")
    lines: list[str] = []
    for name in sorted(functions.recipes):
        if not re.search(r"_(?:pretrain|sft|peft|finetune)_.*config$", name) or name.startswith("_"):
            continue
        state, stem = functions.read(name), re.split(r"_(?:pretrain|sft|peft|finetune)_", name)[0]
        if not state.get("model.hf_model_id"):  # a provider by its sizes: the model of the recipe that fine-tunes it
            others = [functions.read(other) for other in sorted(functions.recipes) if other.startswith(f"{stem}_sft_")]
            # Where none names it, whose tokenizer it has.
            ids = (of.get(key) for key in ("model.hf_model_id", TOKENIZER) for of in (state, *others))
            state["model.hf_model_id"] = next(filter(None, ids), None)
        if not state["model.hf_model_id"]:
            continue
        if state.get("peft.dim") and not isinstance(state["peft.dim"], int):
            state["peft.dim"] = 32
        if any(key.startswith("comm_overlap.") for key in state):  # `CommOverlapConfig._get_optimizer_overlap_cfgs`
            state["ddp.overlap_grad_reduce"] = state.get("comm_overlap.overlap_grad_reduce", True)
        words: dict[str, str] = {}
        for key, short in KEPT.items():
            value = state.get(key)
            usual = value == 1 and short in ("tp", "pp", "cp", "ep", "vpp")
            if value not in (None, False, "", [], USUAL.get(short)) and not usual:
                words[short] = ",".join(value) if isinstance(value, list | tuple) else str(value)
            elif value is False and short in ("shared", "reduced", "grads_beside"):
                words[short] = "False"
        lines.append(f'{name} = "{" ".join(f"{key}={value}" for key, value in words.items())}"')
    known = {line.split(" = ")[0] for line in lines}
    also = sorted((name, of) for name, of in functions.aliases.items() if of in known and name not in known)
    head = (
        f"# What the recipes of Megatron-Bridge set: src/megatron/bridge/recipes at commit {commit} of {date}"
        " (tools/bridge_recipes.py).\n"
    )
    return head + "[recipes]\n" + "\n".join(lines) + "\n\n[also]\n" + "".join(f'{name} = "{of}"\n' for name, of in also)


if __name__ == "__main__":
    print(main(*sys.argv[1:]), end="")

"""Where memory ran out: the phase and the tensor that its traceback names, and what shrinks it.

The frames of a Python traceback say it, the innermost first: each rule is a place in a library's source (or a name that
every training program uses), what runs there, and which tensor it makes. Nothing of the text is executed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.pytorch.why.causes import bare
from loadgauge.pytorch.why.message import REACH, around, plain

if TYPE_CHECKING:
    from loadgauge.core.estimate.result import Estimate

FRAME = re.compile(
    r'File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9}), in (?P<function>[^\n]{1,200})\n'
    r'(?:[ \t]*+(?!File ")(?P<code>[^\n]{0,300}))?'
)
MOST_FRAMES = 2000


class Frame(msgspec.Struct, frozen=True):
    """One call: file, line, function, and the line of code, where it is printed."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        short = "/".join(self.file.replace("\\", "/").split("/")[-3:])
        return f"{short}:{self.line} {self.function}" + (f": {self.code}" if self.code else "")


class Rule(msgspec.Struct, frozen=True):
    """A place in the source: patterns of the file, the function and the code, which all must occur in one frame.

    tensor: what the line makes, empty where only the phase is known; remedy: what makes it smaller, in words
    changes: the same as fields of a job, the mildest first
    per_parameter: bytes that it takes for each trained parameter of the rank's share; 0: it is of something else
    """

    phase: str = ""
    tensor: str = ""
    remedy: str = ""
    file: str = ""
    function: str = ""
    code: str = ""
    changes: tuple[dict[str, Any], ...] = ()
    per_parameter: int = 0

    def holds(self, frame: Frame) -> bool:
        """Return whether the frame is at this place."""
        return all(
            not pattern or re.search(pattern, text)
            for pattern, text in ((self.file, frame.file), (self.function, frame.function), (self.code, frame.code))
        )


STEP = "optimizer step"
FUSED: tuple[dict[str, Any], ...] = ({"optimizer": "adamw-fused"},)
LESS_STATE: tuple[dict[str, Any], ...] = ({"optimizer": "adamw-8bit"}, {"offload": "optimizer"})
NO_FOREACH = (
    "the fused optimizer makes no such lists (optim='adamw_torch_fused', or fused=True), nor does foreach=False; an optimizer of"
    " 8-bit states makes smaller ones"
)
SHRINK_BATCH: tuple[dict[str, Any], ...] = ({"recompute": "full"}, {"micro_batch": 1}, {"loss": "chunked"})
NO_SCORES = "fused attention never writes them (attn_implementation='sdpa' or 'flash_attention_2')"
CHUNKED = "make the loss in chunks (Liger's fused loss, --loss chunked), or fewer tokens at once"

TENSORS: tuple[Rule, ...] = (
    Rule(
        STEP,
        "the square roots of all second moments, a list as large as the moments",
        NO_FOREACH,
        "torch/optim/",
        code=r"_foreach_sqrt",
        changes=(*FUSED, *LESS_STATE),
        per_parameter=4,
    ),
    Rule(
        STEP,
        "a temporary list as large as the moments, of torch._foreach_div and its kind",
        NO_FOREACH,
        "torch/optim/",
        code=r"_foreach_(div|add|mul|lerp|addcmul|addcdiv|maximum|neg|reciprocal|pow|sub)\b",
        changes=(*FUSED, *LESS_STATE),
        per_parameter=4,
    ),
    Rule(
        STEP,
        "the optimizer's states, which it makes in the first step",
        "fewer bytes of states (8-bit, Adafactor), shards of them (ZeRO 1, FSDP), or states on the host",
        r"torch/optim/|bitsandbytes/optim",
        r"_init_group|init_state|_init_state",
        changes=LESS_STATE,
        per_parameter=4,
    ),
    Rule(
        STEP,
        "float32 temporaries of one weight's update",
        "smaller single weights do not exist: free memory elsewhere, by shards of the states or 8-bit states",
        r"torch/optim/|transformers/optimization\.py|/(galore_torch|apollo_torch|lomo_optim|schedulefree|adam_mini|came_pytorch)/",
        r"_single_tensor_|_adafactor|^step$|^_get_lr$|^_rms$|^_approx_sq_grad$|^_step",
        changes=LESS_STATE,
    ),
    Rule(
        STEP,
        "float32 copies of the gradients of this rank's share, for the update",
        "more ranks to shard over, or the optimizer on the host (offload_optimizer)",
        "deepspeed/runtime/(zero|bf16_optimizer|fp16)",
        code=r"\.float\(\)|float32|flatten",
        changes=({"offload": "optimizer"},),
        per_parameter=4,
    ),
    Rule(
        STEP,
        "states and float32 copies of this rank's share of the parameters",
        "more ranks to shard over, or the optimizer on the host (offload_optimizer)",
        "deepspeed/runtime/(zero|bf16_optimizer|fp16)",
        r"initialize_optimizer_states|^_?step|"
        r"_optimizer_step|unscale_and_clip|_create_fp32_partitions|get_grad_norm",
        changes=({"offload": "optimizer"},),
        per_parameter=4,
    ),
    Rule(
        "gradient clipping",
        "norms of the gradients, or scaled copies of them",
        "fewer gradients at once: shards of them (ZeRO 2, FSDP)",
        "torch/nn/utils/clip_grad|accelerate/accelerator",
        r"clip_grad|_get_total_norm|get_total_norm",
        changes=({"zero": 2}, {"zero": 3}),
    ),
    Rule(
        "evaluation",
        "the logits of all evaluation batches, joined (twice for a moment)",
        "keep the loss alone (prediction_loss_only=True), or move logits to the host (eval_accumulation_steps=1)",
        "trainer_pt_utils|transformers/trainer",
        r"nested_concat|torch_pad_and_concatenate|^add$|nested_gather|pad_across",
        changes=({"eval_batches": 0}, {"eval_batch": 1, "eval_batches": 0}),
    ),
    Rule(
        "generation",
        "the cache of keys and values",
        "fewer sequences or tokens at once, or a quantised cache",
        "cache_utils",
        "update",
        changes=({"eval_batch": 1},),
    ),
    Rule(
        "saving",
        "weights gathered whole for a checkpoint",
        "sharded checkpoints (SHARDED_STATE_DICT; without stage3_gather_16bit_weights_on_model_save)",
        r"_state_dict_utils|state_dict|zero/partition_parameters",
        r"state_dict|_zero3_consolidated|summon_full|_full_",
        changes=({"save": "sharded"},),
    ),
    Rule(
        tensor="weights gathered from other ranks",
        remedy="gather layer by layer (an auto-wrap policy; smaller stage3_max_live_parameters and buckets)",
        file=r"fsdp/|_fsdp|_composable|zero/(partition|stage3|parameter_offload)",
        function=r"unshard|all_gather|allgather|_allgather|fetch_sub_module|alloc",
    ),
    Rule(
        "loss",
        "a float32 copy of the logits: tokens x vocabulary x 4 bytes",
        CHUNKED,
        r"",
        code=r"logits\w*\s*=.*(\.float\(\)|float32)|upcast",
        changes=({"loss": "chunked"}, *SHRINK_BATCH),
    ),
    Rule(
        "loss",
        "the log-probabilities of the loss: tokens x vocabulary x 4 bytes",
        CHUNKED,
        r"torch/nn/functional\.py|modules/loss\.py|loss_utils\.py|cross_entropy",
        r"cross_entropy|log_softmax|fixed_cross_entropy|ForCausalLMLoss",
        changes=({"loss": "chunked"}, *SHRINK_BATCH),
    ),
    Rule(
        "loss",
        "log-probabilities or entropies over the whole vocabulary: tokens x vocabulary",
        "fewer tokens at once (verl: a smaller ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu), or in chunks (verl:"
        " entropy_from_logits_with_chunking=True, and entropy_checkpointing=True)",
        function=r"entropy_from_logits|logprobs?_from_logits|log_probs_from_logits|selective_log_softmax|compute_entropy",
        changes=({"loss": "chunked"}, *SHRINK_BATCH),
    ),
    Rule(
        "waking the engine",
        "the engine's weights and cache",
        "a smaller share for the engine (gpu_memory_utilization)",
        r"device_allocator/cumem|torch_memory_saver",
    ),
    Rule(
        "loss",
        "the logits: tokens x vocabulary",
        CHUNKED,
        code=r"lm_head\(|embed_out\(|output_layer\(",
        changes=({"loss": "chunked"}, *SHRINK_BATCH),
    ),
    Rule(
        tensor="attention scores: heads x queries x keys",
        remedy=NO_SCORES,
        function=r"eager_attention|attention_math|repeat_kv",
        changes=({"attention": "flash"},),
    ),
    Rule(
        tensor="attention scores: heads x queries x keys",
        remedy=NO_SCORES,
        code=r"attn_weights\s*=|softmax\(.*(attn|scores)|matmul\(query",
        changes=({"attention": "flash"},),
    ),
    Rule(
        tensor="a weight of 4 bits in 16 bits, for one product",
        remedy="no change of the job makes it smaller: the largest weight decides",
        file=r"bitsandbytes",
        function=r"dequantize|MatMul4Bit|^forward$|^backward$",
        code=r"dequantize",
    ),
    Rule(
        "loading",
        "the weights",
        "load them in 16 bits (dtype='bfloat16') or 4 bits, or shard them while loading",
        r"modeling_utils|core_model_loading|torch/nn/modules/module\.py|accelerate/big_modeling",
        r"from_pretrained|_load_|convert|^to$|^cuda$|_apply|load_state_dict|materialize|dispatch_model",
        changes=({"zero": 3}, {"qlora": True}),
    ),
)
"""What a frame makes, by the first rule that holds for the innermost frame that any rule holds for."""

PHASES: tuple[tuple[str, Rule], ...] = (
    (
        "evaluation",
        Rule(function=r"^(evaluat(e|ion_loop)|predict(ion_step|ion_loop)?|validat(e|ion_step))\b"),
    ),
    ("generation", Rule(function=r"^(generate|_sample|_beam_search|_greedy_search)\b")),
    ("saving", Rule(function=r"^(save_model|_save_checkpoint|save_checkpoint|save_state|get_state_dict|_save)\b")),
    (STEP, Rule(file=r"torch/optim/|bitsandbytes/optim|apex/optimizers|deepspeed/ops/adam")),
    (
        STEP,
        Rule(
            file="deepspeed/runtime/",
            function=r"^(step|_take_model_step|_optimizer_step|initialize_optimizer_states)\b",
        ),
    ),
    (
        "recomputation in the backward",
        Rule(file=r"torch/utils/checkpoint\.py", function="recompute_fn|unpack_hook|^backward$"),
    ),
    ("backward", Rule(function=r"^backward\b|_engine_run_backward|^apply$")),
    ("backward", Rule(code=r"\.backward\(|_engine_run_backward|run_backward")),
    ("forward", Rule(function=r"^(forward|_call_impl|_wrapped_call_impl|compute_loss)\b")),
    ("loading", Rule(function=r"from_pretrained|load_model")),
    (STEP, Rule(code=r"optimizer\.step\(")),
)
"""What a frame says about the phase, the surest first; one of them anywhere in the stack is enough."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where memory ran out.

    frame: the innermost call that says what was made; own: the innermost call that is not a library's
    """

    phase: str
    tensor: str
    remedy: str
    frame: str
    own: str = ""
    changes: tuple[dict[str, Any], ...] = ()
    per_parameter: int = 0

    def same_size(self, tried: int, result: Estimate) -> str:
        """Return how the size that was asked for follows from an estimate's parameters; empty where it does not.

        tried: [bytes]. A whole list is asked for tensor by tensor, so it is matched where one allocation is the rank's whole share,
        as in DeepSpeed's flat partitions.
        """
        if not self.per_parameter:
            return ""
        weights = result.workings.worst.rank.weights.all.trainable
        for ranks in dict.fromkeys((result.layout.zero_ranks, 1)):
            if abs(tried * ranks / (weights * self.per_parameter) - 1) < 0.01:
                over = f" / {ranks} ranks" if ranks > 1 else ""
                return f"{weights:,} trained parameters x {self.per_parameter} B{over}"
        return ""


def frames(text: str) -> list[Frame]:
    """Return the calls of the last traceback before the first out-of-memory error, the outermost first.

    >>> frames('Traceback (most recent call last):\\n  File "a.py", line 3, in step\\n    loss.backward()\\n')[0].code
    'loss.backward()'
    """
    end = re.search(r"[Tt]ried to allocate|cumem_allocator\.cpp", text)
    text = around(text, end.start())[0] if end else plain(text[-REACH:])
    matches = FRAME.finditer(text, max(text.rfind("Traceback (most recent call last)"), 0))
    # Carets under the code; where a program's source is not at hand, the next frame follows at once.
    return [
        Frame(match["file"], int(match["line"]), match["function"].strip(), _code(match["code"]))
        for match, _ in zip(matches, range(MOST_FRAMES), strict=False)
    ]


def _code(line: str | None) -> str:
    text = (line or "").strip()
    return "" if text.startswith(("^", "~")) else text


def place(text: str) -> Place | None:
    """Return where memory ran out by the traceback of a text; None where there is no traceback in it.

    >>> found = place('''Traceback (most recent call last):
    ...   File "/x/torch/optim/adamw.py", line 624, in _multi_tensor_adamw
    ...     exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)
    ... torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB.''')
    >>> found.phase, found.tensor
    ('optimizer step', 'the square roots of all second moments, a list as large as the moments')
    """
    stated = None if re.search(r"[Tt]ried to allocate", text) else bare(text)
    calls = frames(text) if stated is None or stated[0].placed else []
    if not calls:
        return None
    inward = calls[::-1]
    own = next((str(frame) for frame in inward if not LIBRARY.search(frame.file)), "")
    frame, rule = _made(inward)
    phase = next((name for name, words in PHASES if any(words.holds(call) for call in inward)), "")
    if rule is None:
        tensor = (
            "activations of this call" if phase in ("forward", "evaluation", "recomputation in the backward") else ""
        )
        tensor = tensor or ("gradients of this call" if phase == "backward" else "not known from the traceback")
        remedy = "fewer tokens at once, recomputation (gradient checkpointing), or shards of the states"
        return Place(
            phase=phase or "not known", tensor=tensor, remedy=remedy, frame=str(frame), own=own, changes=SHRINK_BATCH
        )
    if rule.phase and phase not in ("evaluation", "generation", "saving", "recomputation in the backward"):
        phase = rule.phase
    return Place(
        phase=phase or rule.phase,
        tensor=rule.tensor,
        remedy=rule.remedy,
        frame=str(frame),
        own=own,
        changes=rule.changes,
        per_parameter=rule.per_parameter,
    )


def _made(inward: Sequence[Frame]) -> tuple[Frame, Rule | None]:
    """The innermost frame that a rule of `TENSORS` holds for, with the rule; else the innermost that is no wrapper."""
    ruled = ((frame, rule) for frame in inward for rule in TENSORS if rule.tensor and rule.holds(frame))
    plain_call = next((frame for frame in inward if not WRAPPER.search(frame.file)), inward[0])
    return next(ruled, (plain_call, None))


WRAPPER = re.compile("torch/(nn/modules/module|nn/functional|_tensor|autograd|utils/_contextlib|_ops)")
"""Files of calls that only hand on what they are called with."""
LIBRARY = re.compile(r"(site|dist)-packages|/lib/python\d|<frozen|<string>")
"""Files that are not the program's own."""

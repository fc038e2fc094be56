"""Small models of text and sound of transformers, and one real step of each on a CPU."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from loadgauge.core.definitions.job.job import Job  # noqa: E402
from loadgauge.pytorch.capture.inputs.kinds import model_class, of_config  # noqa: E402
from loadgauge.pytorch.trace.torch_run import TorchRun  # noqa: E402
from torch_kept import addresses, owned  # noqa: E402


def _grouped(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of a convolution's backward by shapes: each weight at each place of the result, for each gradient. PyTorch's own
    formula lets the channels of all groups meet."""
    assert not rest[4]  # transposed
    return int(2 * grad[0] * math.prod(grad[2:]) * math.prod(weight) * sum(rest[7][:2]))


GROUPED = {torch.ops.aten.convolution_backward: _grouped}

TOKEN, PICTURE = 300, 301
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 320, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "d_model": 16, "hidden_size": 16, "encoder_layers": 1, "num_hidden_layers": 1, "encoder_attention_heads": 2,
    "num_attention_heads": 2, "encoder_ffn_dim": 64, "intermediate_size": 64, "num_mel_bins": 8, "dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": TOWER | {"max_source_positions": 1500}},
    "audioflamingo3": {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": TOWER},
    "musicflamingo": {
        "text_config": TEXT | {"model_type": "qwen2"}, "audio_config": TOWER | {"model_type": "audioflamingo3_encoder"},
    },
    "glmasr": {"text_config": TEXT | {"model_type": "llama"}, "audio_config": TOWER | {"head_dim": 8, "num_key_value_heads": 2}},
    "voxtral": {"text_config": TEXT | {"model_type": "llama"}, "audio_config": TOWER},
    "moss_transcribe_diarize": {"text_config": TEXT | {"model_type": "qwen3"}, "audio_config": TOWER},
    "qwen3_asr": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "audio_config": TOWER | {"downsample_hidden_size": 8, "output_dim": 32, "n_window": 50},
    },
    "qwen2_5_omni_thinker": {
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "audio_config": TOWER | {"output_dim": 32, "n_window": 100},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
                          "fullatt_block_indexes": [0]},
        "image_token_id": PICTURE, "video_token_id": 302, "vision_start_token_id": 303,
    },
    "gemma4_unified": {
        "text_config": TEXT | {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 0,
                               "num_kv_shared_layers": 0, "global_head_dim": 8, "num_global_key_value_heads": 2},
        "audio_config": {"model_type": "gemma4_unified_audio"},
    },
    "phi4_multimodal": TEXT | {
        "original_max_position_embeddings": 512, "max_position_embeddings": 512, "sliding_window": None,
        "audio_config": {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2, "input_size": 80,
                         "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8,
                         "audio_token_id": TOKEN},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "fun_asr_nano": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "audio_config": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 1,
                         "num_timestamp_prediction_layers": 1, "num_mel_bins": 8, "num_stacked_frames": 7,
                         "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "adaptor_config": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1,
                           "projector_hidden_size": 24},
    },
    "granite_speech": {
        "text_config": TEXT | {"model_type": "granite", "attention_dropout": 0.0}, "has_lora_adapter": False,
        "encoder_config": {"input_dim": 16, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "feedforward_mult": 2,
                           "context_size": 25, "max_pos_emb": 32, "conv_kernel_size": 5, "output_dim": 8, "dropout": 0.0},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                             "intermediate_size": 24, "encoder_hidden_size": 16, "hidden_dropout_prob": 0.0,
                             "attention_probs_dropout_prob": 0.0},
    },
}  # fmt: skip


def config_of(kind: str) -> Any:
    """The config object of a small model."""
    return transformers.CONFIG_MAPPING[kind](**MODELS[kind], **{_token(kind): TOKEN})


def _token(kind: str) -> str:
    return "audio_token_id" if hasattr(transformers.CONFIG_MAPPING[kind](), "audio_token_id") else "audio_token_index"


def job_of(kind: str) -> Any:
    """Its training in float32, with attention written out, as a CPU runs it."""
    return of_config(
        config_of(kind), TorchRun.of(Job(model="", seq_len=1, precision="fp32", optimizer="sgd", attention="eager"))
    )


class _Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Step:
    """A real step on a CPU: parameters, FLOPs of forward and backward, bytes that autograd keeps beside parameters and inputs."""

    def __init__(self, kind: str, tokens: int, **sizes: int) -> None:
        job = job_of(kind)
        config = config_of(kind)
        module = model_class(config)._from_config(config, attn_implementation="eager").train()
        _, given = job.inputs(
            "cpu", job.build("meta"), **sizes
        )  # which has the module count, not take what it is given
        given = {name: _filled(name, one, tokens, 64 * ("pixel_values" in given)) for name, one in given.items()}
        given["labels"] = given["input_ids"]
        inputs = [one for one in given.values() if isinstance(one, torch.Tensor)]
        heard: list[str] = []
        for name, part in module.named_modules():
            part.register_forward_hook(lambda *_, name=name: heard.append(name))
        own, saved = owned(module) | addresses(inputs), weakref.WeakSet()  # what the graph let go of is not kept

        def pack(tensor: torch.Tensor) -> _Saved:
            saved.add(one := _Saved(tensor))
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            loss = module(**given).loss
        storages = {one.tensor.untyped_storage().data_ptr(): one.tensor.untyped_storage().nbytes() for one in saved}
        self.kept = sum(nbytes for address, nbytes in storages.items() if address not in own)
        with FlopCounterMode(
            display=False, custom_mapping=GROUPED
        ) as counter:  # which holds on to what the graph let go of
            module(**given).loss.backward()
        self.flops = counter.get_total_flops()
        self.parameters = sum(one.numel() for one in module.parameters())
        self.ran = heard
        self.loss = float(loss)


def _filled(name: str, given: Any, tokens: int, pictures: int) -> Any:
    given = getattr(given, "_loadgauge_value", given)
    if not isinstance(given, torch.Tensor) or "mask" in name:
        return given
    if given.dtype.is_floating_point:
        return torch.randn_like(given)
    if name in ("input_ids", "labels"):
        ids = torch.randint(3, TOKEN, given.shape)
        ids[:, 1 : 1 + tokens] = TOKEN
        ids[:, -1 - pictures : -1] = PICTURE
        return ids
    return given

"""Sizes of small towers and of what stands beside them, as configs have them."""

FIXED = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 112,
         "patch_size": 14}  # fmt: skip
FREE = {
    "depth": 4,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 256,
    "out_hidden_size": 128,
    "patch_size": 14,
}
GRIDS = {"image_grid_pinpoints": [[112, 224], [224, 112], [224, 224]]}
EXPERTS = {"intermediate_size": 96, "intermediate_size_mlp": 352, "num_local_experts": 4, "num_experts_per_tok": 1,
           "interleave_moe_layer_step": 1}  # fmt: skip

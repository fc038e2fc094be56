#!/bin/bash
# A Megatron-LM job of 64 GPUs.
torchrun --nnodes 8 --nproc_per_node 8 pretrain_gpt.py \
  --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
  --ffn-hidden-size 28672 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
  --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer \
  --micro-batch-size 1 --global-batch-size 512 --bf16 --recompute-activations --use-flash-attn

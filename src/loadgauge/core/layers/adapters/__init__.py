"""LoRA and PEFT's other methods beside a linear layer, and virtual tokens."""

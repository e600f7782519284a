"""torchtitan: FSDP2 x tensor parallel (with sequence parallel) x pipeline parallel, for llama, qwen2 and qwen3."""

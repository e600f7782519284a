"""Megatron-core: tensor, pipeline and sequence parallel, and its distributed optimizer. TransformerEngine and Apex are not needed."""

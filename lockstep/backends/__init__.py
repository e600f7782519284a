"""Backends: engines that are packages of their own. Megatron-Core, torchtitan and VeOmni train; vLLM and SGLang generate.

`lockstep.workers.engine.registry` and `lockstep.workers.rollout.registry` import one of them when a run chooses it.
"""

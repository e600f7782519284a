"""Kernels: Triton kernels and flash attention that training and generation share, so that both round alike on a GPU.

Each module is entered by its own name. The modules with Triton kernels (`experts`, `join`, `layers`, `segments`, `tokens`) need Triton
when they are imported; import them where a GPU is in use.
"""

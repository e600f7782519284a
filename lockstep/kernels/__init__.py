"""Kernels: Triton kernels and flash attention that training and generation share, so that both round alike on a GPU.

Each module is entered by its own name. The modules with Triton kernels need Triton when they are imported: `experts`, `join`, `layers`,
`segment_attention`, `tokens`. Import them where a GPU is in use.
"""

"""The native engine on a CUDA device: Triton kernels, a decode step captured in CUDA graphs, and the loop that feeds it."""

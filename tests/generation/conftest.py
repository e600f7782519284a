from helpers.fake_gpu import make_gpu

__all__ = ["make_gpu"]

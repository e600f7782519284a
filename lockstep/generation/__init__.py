"""Generation: the native engine, which decodes from the trainer's own weights with continuous batching, on a CPU and on a GPU.

Other rooms import from here; the names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.generation.engine import NativeRollout, warm_generation
    from lockstep.generation.model_support import check_small_cache, check_small_cache_capability, check_small_cache_config
    from lockstep.generation.offline_engine import Engine, GeneratedText, dtype_of, load_module
    from lockstep.generation.routing import RoutedRollout

__getattr__ = lazy_names(
    __name__,
    {
        "engine": "NativeRollout warm_generation",
        "model_support": "check_small_cache check_small_cache_capability check_small_cache_config",
        "offline_engine": "Engine GeneratedText dtype_of load_module",
        "routing": "RoutedRollout",
    },
)

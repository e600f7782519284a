"""verl's import paths: which names its modules have, and where these are in Lockstep. A place is `module:name`, or a module alone."""

import importlib
import sys
from types import ModuleType
from typing import Any

OURS = "lockstep.compat.verl"


def _named(place: str, names: str) -> dict[str, str]:
    """Names that are called the same at `place`."""
    return {name: f"{place}:{name}" for name in names.split()}


def _same(place: str, names: str) -> dict[str, str]:
    """Several names for one object."""
    return dict.fromkeys(names.split(), place)


_WORKER = _same("lockstep.single_controller.base:Worker", "WorkerType")
_DATASET = _named(f"{OURS}.functions", "create_rl_dataset create_rl_sampler")
_TIMERS = _same(f"{OURS}.functions:marked_timer", "marked_timer simple_timer _timer")
_MANAGERS = _same(
    f"{OURS}.functions:VerlRewardManager",
    "AbstractRewardManager NaiveRewardManager BatchRewardManager PrimeRewardManager DAPORewardManager",
)
_RAY_GROUP = {
    "RayClassWithInitArgs": "lockstep.single_controller.base:ClassWithInitArgs",
    "RayResourcePool": f"{OURS}.functions:RayResourcePool",
    "RayWorkerGroup": "lockstep.single_controller.ray.worker_group:RayWorkerGroup",
    **_same("builtins:dict", "create_colocated_worker_cls create_colocated_worker_cls_fused"),
}

ADDED: dict[str, dict[str, str]] = {
    "protocol": {
        "DataProtoConfig": f"{OURS}.functions:DataProtoConfig",
        "DataProtoFuture": "lockstep.single_controller.base:Future",
    },
    "single_controller.base.decorator": {
        **_named("lockstep.single_controller.base", "register_dispatch_mode"),
        **_named(f"{OURS}.functions", "make_nd_compute_dataproto_dispatch_fn"),
    },
    "single_controller.ray": _RAY_GROUP,
    "trainer.main_ppo": {**_DATASET, **_named(f"{OURS}.loop", "run_ppo TaskRunner")},
    "trainer.ppo.ray_trainer": {
        **_WORKER,
        **_named("lockstep.compat.core_algos", "AdvantageEstimator"),
        **_named(f"{OURS}.functions", "apply_kl_penalty compute_advantage compute_response_mask marked_timer"),
        "_timer": f"{OURS}.functions:marked_timer",
    },
    "utils": {
        **_named("lockstep.utils.tokenizer", "hf_tokenizer"),
        "hf_processor": f"{OURS}.functions:nothing",
        "omega_conf_to_dataclass": "lockstep.compat.verl_keys.command:our_config",
    },
    "utils.device": {
        **_named(f"{OURS}.functions", "get_device_name is_cuda_available is_npu_available"),
        "auto_set_device": f"{OURS}.functions:nothing",
    },
    "utils.tokenizer": {"hf_processor": f"{OURS}.functions:nothing"},
    "utils.dataset": _named("lockstep.compat.verl.padded", "collate_fn"),
    "utils.dataset.rl_dataset": _named("lockstep.compat.verl.padded", "collate_fn"),
    "utils.reward_score": {
        "_default_compute_score": "lockstep.rewards.graders:default_compute_score",
        **_same("lockstep.judging.math", "math_reward math_verify prime_math"),
        "math_dapo": "lockstep.judging.competition",
        **_same("lockstep.judging.code", "prime_code sandbox_fusion"),
        "search_r1_like_qa_em": "lockstep.rewards.graders.question",
        "geo3k": "lockstep.judging.geometry",
    },
    "workers.reward_manager": {**_MANAGERS, **_named(f"{OURS}.functions", "get_reward_manager_cls register")},
}
"""Lockstep's modules -> the names of verl's that they get beside their own."""

_CONFIGS = {
    "ActorConfig": f"{OURS}.functions:ActorConfig",
    **_named("lockstep.config.algorithm", "RolloutCorrectionConfig KLControlConfig FilterGroupsConfig"),
    **_named("lockstep.config.actor_rollout_ref", "PolicyLossConfig RolloutConfig"),
    **_named("lockstep.config.critic", "CriticConfig"),
    **_named("lockstep.config.reward", "RewardModelConfig"),
    "AlgoConfig": "lockstep.config.algorithm:AlgorithmConfig",
    "HFModelConfig": "lockstep.config.engine:ModelConfig",
    "FSDPEngineConfig": "lockstep.config.engine:FSDPConfig",
    **_same("lockstep.config.engine:OptimConfig", "FSDPOptimizerConfig OptimizerConfig"),
}
_WORKERS = {
    **_same("lockstep.workers.engine_workers:ActorRolloutRefWorker", "ActorRolloutRefWorker AsyncActorRolloutRefWorker"),
    **_same("lockstep.workers.engine_workers:TrainingWorker", "TrainingWorker CriticWorker RewardModelWorker"),
}
_FILES = {
    **_same(f"{OURS}.functions:copy_to_local", "copy_to_local copy_local_path_from_hdfs"),
    **_same("os:makedirs", "makedirs local_mkdir_safe"),
    "exists": "os.path:exists",
    "copy": "shutil:copy",
}
_MATH = {
    "compute_score": "lockstep.judging.math:compute_score",
    **_named(f"{OURS}.functions", "is_equiv last_boxed_only_string remove_boxed"),
}
_SAMPLERS = _same("torch.utils.data:Sampler", "AbstractSampler AbstractCurriculumSampler")

MODULES: dict[str, dict[str, str]] = {
    "trainer.main_ppo_v0": {**_DATASET, **_named(f"{OURS}.loop", "run_ppo TaskRunner")},
    "trainer.constants_ppo": {
        "get_ppo_ray_runtime_env": "builtins:dict",
        "PPO_RAY_RUNTIME_ENV": f"{OURS}.functions:PPO_RAY_RUNTIME_ENV",
    },
    "trainer.ppo.metric_utils": _named(
        f"{OURS}.numbers",
        "compute_data_metrics compute_timing_metrics compute_throughout_metrics reduce_metrics process_validation_metrics"
        " bootstrap_metric calc_maj_val _compute_response_info",
    ),
    "trainer.ppo.reward": {
        **_named(f"{OURS}.functions", "extract_reward load_reward_manager compute_reward get_custom_reward_fn"),
        "compute_reward_async": f"{OURS}.functions:compute_reward",
    },
    "trainer.ppo.rollout_corr_helper": _named(
        f"{OURS}.numbers",
        "compute_rollout_correction_and_rejection_mask compute_rollout_correction_and_add_to_batch compute_offpolicy_metrics"
        " compute_is_metrics SUPPORTED_ROLLOUT_RS_OPTIONS",
    ),
    "trainer.ppo.utils": {
        **_WORKER,
        **_DATASET,
        **_named("lockstep.trainer.role", "Role"),
        **_named(f"{OURS}.functions", "need_critic need_reference_policy"),
    },
    "trainer.config": _CONFIGS,
    "trainer.config.algorithm": _CONFIGS,
    "workers.config": _CONFIGS,
    "workers.config.actor": _CONFIGS,
    "utils.config": _same("lockstep.compat.verl_keys.command:our_config", "validate_config omega_conf_to_dataclass"),
    "utils.fs": _FILES,
    "utils.hdfs_io": _FILES,
    "utils.tracking": _named(f"{OURS}.functions", "Tracking"),
    "utils.metric": _named(f"{OURS}.numbers", "reduce_metrics"),
    "utils.debug": _TIMERS,
    "utils.profiler": _TIMERS,
    "utils.profiler.performance": _TIMERS,
    "utils.py_functional": {
        **_named(f"{OURS}.functions", "append_to_dict"),
        "convert_to_regular_types": "lockstep.config.load:plain",
    },
    "utils.import_utils": {
        **_same("lockstep.utils.files:load_object", "load_extern_type load_extern_object"),
        "deprecated": "typing_extensions:deprecated",
    },
    "utils.seqlen_balancing": _named(f"{OURS}.functions", "get_seqlen_balanced_partitions log_seqlen_unbalance"),
    "utils.torch_functional": _named("lockstep.algorithms.masking", "masked_mean masked_sum masked_var masked_whiten"),
    "utils.model": _named(f"{OURS}.functions", "compute_position_id_with_mask"),
    "utils.checkpoint.checkpoint_manager": {
        "find_latest_ckpt_path": "lockstep.checkpoint.folders:newest",
        "should_save_ckpt_esi": f"{OURS}.functions:nothing",
    },
    "utils.reward_score.gsm8k": _named("lockstep.rewards.graders.gsm8k", "compute_score"),
    "utils.reward_score.math": _MATH,
    "utils.reward_score.math_reward": _MATH,
    "utils.reward_score.math_verify": _MATH,
    "utils.reward_score.prime_math": _MATH,
    "utils.reward_score.math_dapo": _MATH | _named("lockstep.judging.competition", "compute_score"),
    "utils.reward_score.prime_code": _named("lockstep.judging.code", "compute_score"),
    "utils.rollout_skip": _named(f"{OURS}.functions", "RolloutSkip"),
    "single_controller.ray.base": _RAY_GROUP,
    "single_controller.ray.megatron": _same(_RAY_GROUP["RayWorkerGroup"], "NVMegatronRayWorkerGroup"),
    "workers.fsdp_workers": _WORKERS,
    "workers.megatron_workers": _WORKERS,
    "workers.reward_manager.abstract": _MANAGERS,
    "workers.reward_manager.naive": _MANAGERS,
    "workers.reward_manager.dapo": _MANAGERS,
    "experimental": {},
    "experimental.dataset": {},
    "experimental.dataset.sampler": _SAMPLERS,
    "experimental.reward_loop": _named(f"{OURS}.functions", "migrate_legacy_reward_impl"),
}
"""verl's modules that Lockstep does not have -> their names."""

_INSTEAD = {
    "a model learns in lockstep.workers.engine and generates in lockstep.workers.rollout": (
        "workers.actor workers.critic workers.rollout.vllm_rollout workers.sharding_manager"
        " utils.fsdp_utils utils.megatron_utils utils.ulysses"
    ),
    "tools are functions (agent.tools), loops and interactions are a lockstep.agents.Environment: docs/agents.md": (
        "tools.base_tool tools.schemas tools.function_tool tools.utils interactions experimental.agent_loop"
    ),
}
"""What replaces verl's modules that have no counterpart."""


class _Module(ModuleType):
    """A module of verl's. Its names are looked up when they are first used."""

    def __init__(self, name: str, names: dict[str, str]) -> None:
        super().__init__(name, f"verl's names, which are elsewhere in Lockstep ({OURS}.names).")
        self.__path__: list[str] = []
        self.__names = names

    def __getattr__(self, name: str) -> Any:
        if name not in self.__names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = _find(self.__names[name])
        setattr(self, name, found)
        return found


class _Explain:
    """A finder that finds nothing: it comes last, and says what replaces a module or a name of verl's."""

    def find_spec(self, full_name: str, path: Any = None, target: Any = None) -> None:
        """Raise ImportError for a module without a counterpart, and for what is missing in one of verl's modules."""
        for instead, paths in _INSTEAD.items():
            if full_name.removeprefix("lockstep.") in paths.split():
                raise ImportError(f"{full_name} has no counterpart: {instead}", name=full_name)
        parent, _, name = full_name.rpartition(".")
        if isinstance(sys.modules.get(parent), _Module):
            raise ImportError(
                f"cannot import name {name!r} from {parent!r}: it has no counterpart (docs/from_verl.md)", name=full_name
            )


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def add_names() -> None:
    """Add verl's modules and names to Lockstep's. A name that Lockstep's module has stays."""
    for path, names in ADDED.items():
        module = importlib.import_module(f"lockstep.{path}")
        for name, place in names.items():
            if not hasattr(module, name):
                setattr(module, name, _find(place))
    for path, names in MODULES.items():
        full_name = f"lockstep.{path}"
        parent, _, name = full_name.rpartition(".")
        sys.modules[full_name] = _Module(full_name, names)
        if parent in sys.modules:
            setattr(sys.modules[parent], name, sys.modules[full_name])
    sys.meta_path.append(_Explain())

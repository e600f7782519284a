"""Check by its config.json alone whether a model can be what the run asks of it, before any weight is read."""

from pathlib import Path

from transformers import PreTrainedModel

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.load import Head, head_config, missing_weights, outline
from lockstep.models.lora import Lora
from lockstep.models.routers import FAMILIES, routers
from lockstep.models.weight_files import WeightFiles

_NO_HEAD = "Unrecognized configuration class"
"""The start of transformers' message for a family without such a head."""


def check_fit(config: ModelConfig, head: Head, key: str, learns: bool = True) -> None:
    """Raise ConfigError or DataError, naming a key under `key` (the place of `config`), if the model cannot be what the run asks of it.

    That is: a head that transformers lacks for this family; a head that the folder lacks, for a model that does not learn (a model that
    `learns` may get a new one); a model that scores in the place of a language model; a load-balance loss without routers; adapters that
    its layers cannot have.
    """
    adapts = learns and config.adapts
    head_config(config, head)
    if head is Head.LANGUAGE_MODEL and not adapts and not config.router_aux_loss_coef:
        return
    try:
        module = outline(config, head)
    except ValueError as error:
        if not str(error).startswith(_NO_HEAD):
            return  # loading says what is wrong with the model
        raise ConfigError(
            f"{key}.path={config.path} cannot have a {head.name.lower()} head: transformers has none for its family; "
            f"set {key}.path to a model of another family"
        ) from error
    if config.router_aux_loss_coef and not (routers(module) and head is not Head.SCORE):
        raise ConfigError(
            f"{key}.router_aux_loss_coef={config.router_aux_loss_coef:g}, but {type(module).__name__} as {head.name.lower()} has no "
            f"router that can be balanced (language models and critics of {', '.join(FAMILIES)} do); set it to 0"
        )
    if head is Head.SCORE and not learns and _lacks_head(module, Path(str(config.path))):
        raise ConfigError(
            f"{key}.path={config.path} has no score head; name a model that scores (an AutoModelForSequenceClassification folder with one "
            "label), such as a checkpoint of lockstep reward-model"
        )
    if adapts:
        Lora(module, config, head, 0, key)


def _lacks_head(module: PreTrainedModel, folder: Path) -> bool:
    """Whether the head, and nothing else, is missing in the folder; a model on the hub is checked after its download."""
    missing = missing_weights(module, WeightFiles(folder)) if folder.is_dir() else None
    return bool(missing) and not any(name.startswith(f"{module.base_model_prefix}.") for name in missing or ())

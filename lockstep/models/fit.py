"""Whether a model can be what is asked of it, by its config.json alone: said before any weight is read."""

from pathlib import Path

from transformers import PreTrainedModel

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.load import Head, head_config, missing_weights, outline
from lockstep.models.lora import Lora
from lockstep.models.routers import FAMILIES, routers
from lockstep.models.weight_files import WeightFiles

_NO_HEAD = "Unrecognized configuration class"
"""How transformers begins to say that a family has no such head."""


def check_fit(config: ModelConfig, head: Head, key: str, learns: bool = True) -> None:
    """Raise ConfigError or DataError, naming the key after `key` (where `config` stands), for a head that transformers does not have for
    this family or, where it does not learn, the folder does not have, a folder that scores where one that writes is needed, a load-balance
    loss without routers, and adapters that its layers cannot have. A model that `learns` may get a new head."""
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
    """Whether the head, and nothing else, is missing in the folder; what is not a folder here is known when it has been downloaded."""
    missing = missing_weights(module, WeightFiles(folder)) if folder.is_dir() else None
    return bool(missing) and not any(name.startswith(f"{module.base_model_prefix}.") for name in missing or ())

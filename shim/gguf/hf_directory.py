"""The Hugging Face directory that stands in for a GGUF: everything but the weights, kept in a cache."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from shim.gguf.config import generation_config, hf_config
from shim.gguf.files import GGUFProblem, Model, fingerprint
from shim.gguf.tokenizer import write_tokenizer


def require_cache(model: Model, cache_root: Path) -> None:
    """GGUFProblem if `hf_directory` will not be able to write its directory."""
    if not (cache_root / fingerprint(model)).is_dir():
        _draft(cache_root).rmdir()


def hf_directory(model: Model, cache_root: Path) -> Path:
    """Writes config.json, generation_config.json and the tokenizer under `cache_root`, once per GGUF and shim's code.

    Safe among processes: the directory appears in one rename, complete. A process that comes second uses the first
    one's. Everybody may read it and nobody else may write to it, whatever the umask (0755 and 0644).
    Raises GGUFProblem if the cache cannot be written, or if config or tokenizer cannot be made.
    """
    target = cache_root / fingerprint(model)
    if target.is_dir():
        return target
    config, generation = hf_config(model), generation_config(model)
    draft = _draft(cache_root)
    try:
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (draft / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
        write_tokenizer(model, draft)
        for file in draft.iterdir():
            file.chmod(0o644)
        draft.chmod(0o755)  # mkdtemp's 0700 would shut out a server that runs as another user
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # no other process came first
                raise
    except OSError as error:
        raise GGUFProblem(
            f"cannot write the cache {cache_root}: {error.strerror}; make room, or set GLM5_SHIM_CACHE_DIR"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _draft(cache_root: Path) -> Path:
    """An empty directory under `cache_root`, which only we may enter (0700)."""
    try:
        absent = [place for place in (cache_root, *cache_root.parents) if not place.exists()]
        for place in reversed(absent):  # mkdir(parents=True) would let a umask of 0 open the parents to everybody
            place.mkdir(mode=0o755, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".draft-", dir=cache_root))
    except OSError as error:
        raise GGUFProblem(f"cannot write the cache {cache_root}: {error.strerror}; set GLM5_SHIM_CACHE_DIR") from None

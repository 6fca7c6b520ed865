"""What a Hugging Face checkpoint takes besides text, by its config.json, in a folder or on the hub. Knows no graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from olive_ext.model.media_types import PLACEHOLDER_KEYS, MediaInput, MediaSpec, Modality
from olive_ext.model.package_config import HfConfig, read_json
from olive_ext.model.types import ModelFiles

logger = logging.getLogger(__name__)


def with_configs(files: ModelFiles, cache: Path | None = None) -> ModelFiles:
    """The files of a checkpoint with its configurations here; of one on the hub they are fetched, or taken from `cache`
    (the user's). Where the hub does not give them nothing changes: such a model cannot be opened either."""
    if files.directory.is_dir():
        return files
    from huggingface_hub import snapshot_download

    name = files.directory.as_posix()
    try:
        folder = Path(snapshot_download(name, cache_dir=cache, allow_patterns=["*.json"]))
        return replace(files, directory=folder, decoder=folder, hf_config=read_json(folder / "config.json", HfConfig))
    except (OSError, ValueError) as error:  # the hub's own errors are both
        logger.debug("no configurations of '%s': %s", name, error)
        return files


def read_checkpoint_media(config: Mapping[str, Any]) -> MediaSpec | None:
    """Pictures, where there is a vision tower and a token for them; None where there is not. Sound of checkpoints is
    not run."""
    token = next((config[key] for key in PLACEHOLDER_KEYS[Modality.IMAGE] if isinstance(config.get(key), int)), None)
    if "vision_config" not in config or token is None:
        return None
    return MediaSpec((MediaInput(Modality.IMAGE, token),))

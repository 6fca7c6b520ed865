"""Whether the Hugging Face hub answers, before anything asks it: a hub that does not answer costs its libraries a
minute of retries, which print lines of their own. Knows no model, and downloads nothing."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from olive_ext.errors import ModelError, OliveExtError
from olive_ext.model.files.package_config import HfConfig, is_hub_name, read_json
from olive_ext.model.types import ModelFiles

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Seconds within which the hub must accept a connection."""

_SWITCH = "HF_HUB_OFFLINE"
_OFFLINE = "OfflineModeIsEnabled"
"""What the libraries say where this module has switched them offline."""

_READERS = ("huggingface_hub.constants", "datasets.config")
"""Modules that read the switch when they are imported."""


@contextmanager
def offline_if_unreachable(names: Iterable[str] = (), *, has_data: bool = False) -> Iterator[None]:
    """While the hub does not answer, sets its libraries offline: they then use what they have cached.

    `names` are what users wrote for models and tokenizers. The hub is tried only where one of them is not a path and
    may be on the hub, or where data may be there (`has_data`). Raises `ModelError` for a name that is not cached here
    while the hub does not answer.
    """
    wanted = [name for name in names if is_hub_name(name)]
    reason = why_unreachable() if wanted or has_data else None
    if reason is None:
        yield
        return
    for name in wanted:
        from huggingface_hub import constants

        if not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
            problem = f"'{name}' is no file or folder here, nor in the hub's cache, and {_endpoint()} cannot be asked"
            raise ModelError(f"{problem}: {reason}", code="needs_network")
    with set_offline():
        try:
            yield
        except OliveExtError as error:
            if _OFFLINE not in str(error):
                raise
            error.code = "needs_network"
            raise error.saying(str(error).replace(_OFFLINE, f"{_endpoint()}: {reason}")) from error.__cause__


def with_configs(files: ModelFiles, cache: Path | None = None) -> ModelFiles:
    """The files of a local checkpoint with its configurations. Those of one on the hub are fetched, or taken from
    `cache` (the user's). Where the hub does not give them nothing changes: such a model cannot be opened either."""
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


@contextmanager
def set_offline() -> Iterator[None]:
    """Sets the hub's libraries offline, in this process and in those that it starts."""
    readers = [vars(module) for name in _READERS if (module := sys.modules.get(name)) is not None]
    values = [reader[_SWITCH] for reader in readers]
    written = {_SWITCH: os.environ[_SWITCH]} if _SWITCH in os.environ else {}
    os.environ[_SWITCH] = "1"
    for reader in readers:
        reader[_SWITCH] = True
    try:
        yield
    finally:
        del os.environ[_SWITCH]
        os.environ.update(written)
        for reader, value in zip(readers, values, strict=True):
            reader[_SWITCH] = value


def why_unreachable() -> str | None:
    """Why the hub, or the proxy before it, cannot be asked; None where it accepts connections."""
    constants: ModuleType | None = sys.modules.get(_READERS[0])
    is_set = os.environ.get(_SWITCH, "").upper() in ("1", "ON", "YES", "TRUE")
    if is_set if constants is None else getattr(constants, _SWITCH, False):
        return f"{_SWITCH} is set"
    address = urlsplit(_endpoint())
    host, scheme = address.hostname or "", address.scheme
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
    if proxy is not None:
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    endpoint = address.hostname or host, address.port or (443 if scheme == "https" else 80)
    answers: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection(endpoint, SECONDS).close()
            answers.append(None)
        except TimeoutError:
            pass
        except (OSError, ValueError, OverflowError) as error:  # also a name or port of which no address can be made
            answers.append(getattr(error, "strerror", None) or str(error))

    # Names are looked up without a limit of time: the thread is left where that hangs.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answers[0] if answers else f"no answer from {endpoint[0]} in {SECONDS:g} s"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

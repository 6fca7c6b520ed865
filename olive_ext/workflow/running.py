"""The run of Olive's engine that is in progress: what passes and evaluators cannot see from where Olive calls them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olive_ext.errors import OliveExtError, RequirementError


@dataclass
class Run:
    """One call of `Engine.run`."""

    input_model: Any
    """Olive's configuration of the model that the recipe starts from."""

    output_dir: Path = field(default_factory=Path)
    """Where Olive saves the output model: a folder, or a file in one."""

    is_search: bool = False
    failures: list[OliveExtError] = field(default_factory=list)
    """What our passes and evaluations raised; a search notes it in the log and goes on."""

    broken: RequirementError | None = None
    """Bounds that the output model breaks, to be raised once it is saved."""

    made_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model id to the names of the passes that made it, ours left out: they change nothing."""

    current: tuple[str, ...] = ()
    """Those of the model that a pass is running on."""

    @property
    def artifacts(self) -> Path:
        """The folder of what Olive writes beside the output model."""
        is_file = self.output_dir.suffix and not self.output_dir.is_dir()
        return self.output_dir.parent if is_file else self.output_dir


running: ContextVar[Run | None] = ContextVar("running", default=None)


def input_model_path() -> str | None:
    """Path of the model that the running recipe starts from; None outside of a run."""
    run = running.get()
    path = run.input_model.config.get("model_path") if run is not None else None
    return path if isinstance(path, str) else None

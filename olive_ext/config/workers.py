"""Where a model's chunks of requests are run. Knows no worker."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from olive_ext.config.base import PositiveInt, Strict, not_bool


class WorkerSettings(Strict):
    """Ray actors, each with the model open. Needs the extra `[ray]`. A number alone is their `count`."""

    count: PositiveInt = 1
    """How many. The numbers are the same bytes for any."""

    address: str | None = None
    """Address of the Ray cluster ("auto": the one that this machine belongs to). None starts Ray on this machine alone;
    an address at which there is no cluster is an error, never this machine instead."""

    resources: dict[str, Annotated[float, BeforeValidator(not_bool), Field(gt=0)]] = Field(default_factory=dict)
    """What each worker takes of a node, as Ray counts it: "CPU", "GPU", "memory" (bytes), or names of your own. A
    worker of a model on CUDA takes one GPU, others none, and its threads of the CPUs."""

    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the workers, for a cluster whose nodes do not have the package or the files."""

    start_timeout: PositiveInt = 600
    """Seconds after which workers for which the cluster has no room, or that do not come up, are an error."""


def _from_count(value: Any) -> Any:
    return {"count": value} if isinstance(value, int | str) and not isinstance(value, bool) else value


Workers = Annotated[
    WorkerSettings,
    BeforeValidator(_from_count, json_schema_input_type=PositiveInt | WorkerSettings),
    Field(description="a number or a mapping"),
]
"""Workers as recipes write them: how many, or the mapping."""

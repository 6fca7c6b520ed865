"""What is on disk and on this machine, resolved and frozen: files, providers, and a session on both."""

from olive_ext.model.content import content_hash, size_on_disk
from olive_ext.model.locate import locate, model_kind
from olive_ext.model.ort_session import open_session
from olive_ext.model.providers import (
    available_providers,
    check_distributions,
    register_libraries,
    resolve_providers,
)
from olive_ext.model.types import DecoderSpec, KvTensor, ModelFiles, Provider, TensorSpec
from olive_ext.model.weights import external_data_plan

__all__ = [
    "DecoderSpec",
    "KvTensor",
    "ModelFiles",
    "Provider",
    "TensorSpec",
    "available_providers",
    "check_distributions",
    "content_hash",
    "external_data_plan",
    "locate",
    "model_kind",
    "open_session",
    "register_libraries",
    "resolve_providers",
    "size_on_disk",
]

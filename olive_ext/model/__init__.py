"""What is on disk and on this machine: a model's files, providers, interface, and every decision that opening it takes.

`resolve` gives all of it as one `ResolvedModel`; `open_session` opens a graph on providers. Knows no engine, no
tokenizer's class and no Olive beyond the model_config.json that it leaves in a folder.
"""

from olive_ext.model.content import content_hash, external_data_plan, size_on_disk
from olive_ext.model.decisions import Decision
from olive_ext.model.locate import locate
from olive_ext.model.ort_session import open_session
from olive_ext.model.providers import available_providers, register_libraries, resolve_providers
from olive_ext.model.resolve import ResolvedModel, resolve
from olive_ext.model.types import DecoderSpec, KvTensor, ModelFiles, Provider

__all__ = [
    "Decision",
    "DecoderSpec",
    "KvTensor",
    "ModelFiles",
    "Provider",
    "ResolvedModel",
    "available_providers",
    "content_hash",
    "external_data_plan",
    "locate",
    "open_session",
    "register_libraries",
    "resolve",
    "resolve_providers",
    "size_on_disk",
]

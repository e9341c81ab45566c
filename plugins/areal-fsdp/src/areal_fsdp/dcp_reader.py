"""Reads torch.distributed.checkpoint folders without trusting them."""

from __future__ import annotations

import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from areal_core.errors import BadInputError

_METADATA = "torch.distributed.checkpoint.metadata"
#: All that the description of tensors is made of; none of it does anything when it is constructed.
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}
_PATH_MODULES = {"pathlib", "pathlib._local"}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes that describe tensors, and refuses every other one."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _PATH_MODULES and name in _PATHS:
            return pathlib.PurePosixPath
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def read_metadata(path: Path) -> Metadata:
    """What ``PATH/.metadata`` says. torch pickles that file: here only what describes tensors is unpickled.

    Raises:
        BadInputError: if it is missing, damaged, or holds anything else.
    """
    file = path / ".metadata"
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise ValueError("it holds no checkpoint metadata")
        for info in (metadata.storage_data or {}).values():
            # A name that leaves the folder would read any file of this machine.
            if Path(str(info.relative_path)).name != str(info.relative_path):
                raise ValueError(f"it refers to {info.relative_path}, outside the checkpoint")
    except FileNotFoundError as error:
        raise BadInputError(f"{file}: missing; {path} is not a complete checkpoint.") from error
    except Exception as error:
        raise BadInputError(f"{file}: cannot read the checkpoint ({error!r}).") from error
    return metadata


class SafeReader(dcp.FileSystemReader):
    """torch's reader, but for the metadata and for entries that are no tensors, which torch would unpickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.state_dict_metadata = tensors_of(metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The entries that are tensors; only those are ever loaded."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

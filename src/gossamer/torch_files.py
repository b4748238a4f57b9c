"""Files in PyTorch's own format, read as plain values and tensors: nothing in them is executed."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.sealed import DTYPES, dtype_word


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU.

    Raises `OSError`, `pickle.UnpicklingError` for what is not plain values and tensors, and `ValueError` for every
    other file that cannot be read.
    """
    _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # a malformed pickle makes torch raise nearly any class of error
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` unless a tensor is one of numbers in memory, which a parameter can be copied from."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = f"of the class {type(tensor).__name__}"
    elif tensor.is_meta or tensor.is_nested:
        kind = "without values" if tensor.is_meta else "of several shapes"
    elif tensor.layout != torch.strided:
        kind = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.dtype not in DTYPES and not tensor.is_complex():
        kind = f"of dtype {dtype_word(tensor.dtype)}"
    else:
        return
    raise ValueError(f"'{name}' is a tensor {kind}; save it as a dense tensor of numbers")


def _check_archive(path: Path) -> None:
    """Raise for entries that are larger than the file, which would fill the memory; `torch.save` stores them as is."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return  # from before PyTorch 1.6: a pickle with the tensors behind it
        size = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise ValueError(f"the archive is damaged: {error}") from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is a compressed archive; save it by torch.save")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"the archive is damaged: its entries are larger than its {size} bytes")

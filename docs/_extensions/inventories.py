"""Where the names of torch and Python are documented.

Sphinx would fetch a list of all their names for that. These are the ones that our pages use, so the
site can be built without a network. A name that is missing here is a warning, and so an error.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from sparsestep.optim import OPTIMIZERS

TORCH = "https://docs.pytorch.org/docs/stable/"
PYTHON = "https://docs.python.org/3/"

_GENERATED = "generated/{0}.html#{0}"
_TORCH = {
    **dict.fromkeys(
        [
            *(f"torch.optim.{each.__name__}" for each in OPTIMIZERS),
            *("torch.nn.Embedding", "torch.nn.EmbeddingBag", "torch.nn.Module"),
            "torch.nn.Parameter",
        ],
        _GENERATED,
    ),
    "torch.nn.modules.module.Module": _GENERATED.replace("{0}", "torch.nn.Module"),
    "torch.nn.modules.sparse.Embedding": _GENERATED.replace("{0}", "torch.nn.Embedding"),
    "torch.nn.modules.sparse.EmbeddingBag": _GENERATED.replace("{0}", "torch.nn.EmbeddingBag"),
    "torch.distributed.device_mesh.DeviceMesh": "distributed.html#{0}",
    "DeviceMesh": "distributed.html#torch.distributed.device_mesh.DeviceMesh",
    "torch.Tensor": "tensors.html#{0}",
    "torch.optim.Optimizer": "optim.html#{0}",
    "torch.optim.optimizer.Optimizer": "optim.html#torch.optim.Optimizer",
    "torch.utils.hooks.RemovableHandle": "notes/modules.html",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
}
_PYTHON = {
    **dict.fromkeys(
        ["bool", "int", "float", "str", "bytes", "tuple", "list", "dict", "object", "type"],
        "library/stdtypes.html#{0}",
    ),
    **dict.fromkeys(["ValueError", "RuntimeError", "UserWarning"], "library/exceptions.html#{0}"),
    **dict.fromkeys(
        ["typing.Any", "typing.Literal", "typing.TypeVar", "typing.Generic"],
        "library/typing.html#{0}",
    ),
    **dict.fromkeys(
        [
            *("collections.abc.Callable", "collections.abc.Iterable", "collections.abc.Iterator"),
            *("collections.abc.Mapping", "collections.abc.Sequence"),
        ],
        "library/collections.abc.html#{0}",
    ),
    "pathlib.Path": "library/pathlib.html#{0}",
    "os.PathLike": "library/os.html#{0}",
    "concurrent.futures._base.Future": "library/concurrent.futures.html#concurrent.futures.Future",
    "None": "library/constants.html#{0}",
}


def write_inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Write a list of names for each project, and return what ``intersphinx_mapping`` wants."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, address, names in (("torch", TORCH, _TORCH), ("python", PYTHON, _PYTHON)):
        path = folder / f"{project}.inv"
        lines = [f"{name} py:class 1 {place.format(name)} -" for name, place in names.items()]
        lines += [f"{name} py:obj 1 {place.format(name)} -" for name, place in names.items()]
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        path.write_bytes(head.encode() + zlib.compress("\n".join([*lines, ""]).encode()))
        mapping[project] = (address, str(path))
    return mapping

"""Lets torchvision be imported where its C++ operators are missing.

The wheels of torchvision on the package index are built for CUDA. Beside a CPU build of
torch their C++ library cannot be loaded, and then the import fails, because its Python
files register fake kernels for two operators that nobody has defined. timm, diffusers
and the vision models of transformers import torchvision, but call neither of the two.
"""

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # a definition lives as long as these


def define_schemas() -> None:
    """Define what torchvision's Python files expect, if its library did not.

    Where that library is there, it is loaded by the import of torchvision; so this asks
    for the import first, and defines only after it failed.
    """
    if _libraries:
        return
    try:
        import torchvision  # noqa: F401  (the import is the question)
    except ImportError:
        return  # none is installed, so that nothing asks for the operators
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)

"""Image encoders of ExecuTorch's multimodal decoders, as in its Qualcomm examples: images to embeddings of tokens.

The classes are loaded from the toolchain's files, so that edits there are compiled. Their package is not imported: it
needs libraries that cannot be installed beside ExecuTorch's torch.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import executorch
import torch
import transformers
from torch import Tensor, nn

from .settle import settle

if TYPE_CHECKING:
    from types import ModuleType

_FOLDER = Path("examples", "qualcomm", "oss_scripts", "llama", "model")


class Vision(nn.Module):
    """Encoder of `SmolVLM` or `InternVL3` with its connector: an image [1, 3, side, side] to embeddings of tokens.

    `vision` and `text` are options of these parts of the configuration, `options` of all of it.
    """

    def __init__(self, decoder: str, side: int, vision: dict[str, Any], text: dict[str, Any], **options: Any) -> None:
        super().__init__()
        architecture, name = _VISION[decoder]
        config = getattr(transformers, f"{architecture}Config")(
            vision_config=vision, text_config=text, attn_implementation="eager", **options
        )
        self.encoder = getattr(_upstream("vision_encoder"), name)(config, side, side)
        settle(self, torch.randn(1, 3, side, side))

    def forward(self, image: Tensor) -> Tensor:
        return self.encoder(image)


_VISION = {"SmolVLM": ("Idefics3", "Idefics3VisionEncoder"), "InternVL3": ("InternVL", "InternVL3VisionEncoder")}


def _upstream(name: str) -> ModuleType:
    places = [Path(one, _FOLDER, f"{name}.py") for one in executorch.__path__]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ImportError(f"this ExecuTorch has no {_FOLDER / name}.py: these cases need one of 1.5 or later")
    loader = SourceFileLoader(f"executorch_examples_{name}", str(found))
    module = importlib.util.module_from_spec(ModuleSpec(loader.name, loader, origin=str(found)))
    # An export looks for the module of a function by its name.
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module

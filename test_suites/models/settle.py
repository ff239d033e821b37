"""Random weights with which a model behaves like a trained model: the outputs of every layer depend on its inputs.

Initial weights of `transformers` and `torch.nn` are meant for training: biases are zero, normalizations have no effect,
scales such as ConvNeXt's start at 1e-6, and after a dozen layers the logits may be 1e-23. Comparisons of such outputs
show no errors of quantization.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

if TYPE_CHECKING:
    from collections.abc import Collection

_WEIGHTED = (nn.Linear, _ConvNd)
_LEAST_DEVIATION = 1e-6


@torch.no_grad()
def settle(model: nn.Module, *inputs: Tensor, heads: Collection[nn.Module] = ()) -> None:
    """Draw the parameters of `model` from torch's generator, and scale them on a batch, in the order of its layers.

    Layer by layer (Mishkin and Matas, "All you need is a good init", 2016): a linear layer or convolution gives outputs
    of standard deviation 1 plus a drawn bias, a batch norm has the statistics of its inputs. Affine parameters of
    normalizations, embeddings, tokens and scales are drawn. A layer that is used several times is scaled at its first
    use.

    The outputs of `heads` (class scores) have mean 0 and deviation 1 over the batch in each channel
    (Kraehenbuehl et al., "Data-dependent initializations of convolutional neural networks", 2016), so that the
    greatest class depends on the input. A head has a bias.

    `inputs` are the batch, as `model` takes it. Leaves `model` in eval mode.
    """
    model.eval()
    _draw(model)
    hooks = []
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            hooks.append(module.register_forward_pre_hook(_Once(_take_statistics)))
        elif isinstance(module, _WEIGHTED):
            hooks.append(module.register_forward_hook(_Once(_standardize if module in heads else _scale)))
    model(*inputs)
    for hook in hooks:
        hook.remove()


class _Once:
    """Calls a hook the first time only: by then a shared layer has its scale."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.called = False

    def __call__(self, *args: Any) -> Any:
        if self.called:
            return None
        self.called = True
        return self.hook(*args)


def _draw(model: nn.Module) -> None:
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                tensor.normal_()
            elif isinstance(module, _WEIGHTED):
                if name == "bias":
                    tensor.uniform_(-0.5, 0.5)
            elif name == "weight" and tensor.dim() == 1:
                # Scale of a normalization of any class.
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.uniform_(-0.5, 0.5)


def _take_statistics(module: _BatchNorm, args: tuple[Tensor, ...]) -> None:
    (x,) = args
    dims = [dim for dim in range(x.dim()) if dim != 1]
    # The random factor simulates the difference between statistics of training and of an input.
    module.running_mean.copy_(x.mean(dims))
    module.running_var.copy_(x.var(dims, correction=0) * torch.empty(x.shape[1]).uniform_(0.8, 1.25))


def _scale(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    bias = _bias_as(module, output)
    plain = output - bias
    deviation = plain.std(correction=0)
    if deviation < _LEAST_DEVIATION:
        return output
    module.weight /= deviation
    return plain / deviation + bias


def _standardize(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    channel = _channel(module, output)
    dims = [dim for dim in range(output.dim()) if dim != channel]
    plain = output - _bias_as(module, output)
    mean = plain.mean(dims)
    deviation = plain.std(dims, correction=0).clamp_min(_LEAST_DEVIATION)
    module.weight /= deviation.reshape(-1, *[1] * (module.weight.dim() - 1))
    module.bias.copy_(-mean / deviation)
    shape = [-1 if dim == channel else 1 for dim in range(output.dim())]
    return (plain - mean.reshape(shape)) / deviation.reshape(shape)


def _bias_as(module: nn.Module, output: Tensor) -> Tensor:
    if module.bias is None:
        return torch.zeros(())
    channel = _channel(module, output)
    return module.bias.reshape([-1 if dim == channel else 1 for dim in range(output.dim())])


def _channel(module: nn.Module, output: Tensor) -> int:
    return output.dim() - 1 if isinstance(module, nn.Linear) else 1

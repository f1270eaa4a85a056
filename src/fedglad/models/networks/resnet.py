"""Residual networks for small images (He et al. 2016, arXiv:1512.03385), computed in less time.

The activations lie channels-last, as in `cnn.py`, and so do all gradients. BatchNorm is bound by
memory, and most of it by the outputs of 1×1 convolutions that widen: there its mean and variance
follow from those of the narrow input, so that convolution and BatchNorm are one convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import conv2d, pad, relu_

from fedglad.models.networks.cnn import channels_last

if TYPE_CHECKING:
    from fedglad.models.resnet import ResNet56

Norm = Callable[[int], nn.Module]


class ResNet(nn.Module):
    """What `ResNet56` and its kin describe."""

    def __init__(self, settings: ResNet56) -> None:
        super().__init__()
        fan_in = settings.width
        self.stem = ConvNorm(settings.channels, fan_in, 3, settings.norm)
        stages = nn.Sequential()
        for k, count in enumerate(settings.blocks):
            planes, stage = settings.width << k, nn.Sequential()
            for j in range(count):
                stride = 2 if k and not j else 1
                block = (Basic if settings.basic else Bottleneck)(
                    fan_in, planes, settings.norm, stride
                )
                stage.append(block)
                fan_in = block.planes
            stages.append(stage)
        self.stages = stages
        self.dense = nn.Linear(fan_in, settings.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(relu_(self.stem(channels_last(x))))
        # Torch's own pooling would send gradients back in the other layout.
        return self.dense(_pixels(x).flatten(1, 2).mean(1))


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut without parameters."""

    def __init__(self, fan_in: int, planes: int, norm: Norm, stride: int) -> None:
        super().__init__()
        self.planes = planes
        self.conv1 = ConvNorm(fan_in, planes, 3, norm, stride)
        self.conv2 = ConvNorm(planes, planes, 3, norm)
        new = (fan_in, planes, stride)
        self.shortcut = nn.Identity() if stride == 1 and fan_in == planes else Padded(*new)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(relu_(self.conv1(x)))
        return relu_(out.add_(self.shortcut(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 and a widening 1×1 convolution, beside the input or a 1×1 convolution of it."""

    def __init__(self, fan_in: int, planes: int, norm: Norm, stride: int) -> None:
        super().__init__()
        self.planes = 4 * planes
        self.conv1 = ConvNorm(fan_in, planes, 1, norm)
        self.conv2 = ConvNorm(planes, planes, 3, norm, stride)
        self.conv3 = ConvNorm(planes, self.planes, 1, norm)
        same = stride == 1 and fan_in == self.planes
        self.shortcut = nn.Identity() if same else ConvNorm(fan_in, self.planes, 1, norm, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv3(relu_(self.conv2(relu_(self.conv1(x)))))
        return relu_(out.add_(self.shortcut(x)))


class Padded(nn.Module):
    """Every `stride`-th pixel, and zeros for the planes that are new (option A of He et al.)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.new, self.stride = fan_out - fan_in, stride

    def forward(self, x: Tensor) -> Tensor:
        taken = _pixels(x)[:, :: self.stride, :: self.stride]
        return pad(taken, (0, self.new)).permute(0, 3, 1, 2)


class ConvNorm(nn.Conv2d):
    """A convolution without bias, padded to keep the size, and the normalisation after it."""

    def __init__(self, fan_in: int, fan_out: int, kernel: int, norm: Norm, stride: int = 1) -> None:
        super().__init__(fan_in, fan_out, kernel, stride, kernel // 2, bias=False)
        self.norm = norm(fan_out)

    def reset_parameters(self) -> None:
        """He et al. 2015, arXiv:1502.01852: deviation √(2 / fan-out)."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, input: Tensor) -> Tensor:
        norm = self.norm
        if isinstance(norm, nn.BatchNorm2d):
            if not norm.training:
                return self._by_running_statistics(input, norm)
            if self.kernel_size == (1, 1) and self.out_channels > self.in_channels:
                return self._by_moments(input, norm)
        return norm(super().forward(input))

    def _by_running_statistics(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        """BatchNorm at rest is a fixed scale and shift of each plane: a convolution has both."""
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        bias = norm.bias - norm.running_mean * scale
        return conv2d(x, self.weight * scale[:, None, None, None], bias, self.stride, self.padding)

    def _by_moments(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        """BatchNorm of y = W x from mean(y) = W mean(x) and var(y) = diag(W cov(x) Wᵀ).

        With s = γ / √(var(y) + ε) it is (s W) x + (β − s mean(y)): y itself is never formed, and
        cov(x) costs a fraction of y where x has fewer planes.
        """
        x = _pixels(x)
        if self.stride != (1, 1):
            x = x[:, :: self.stride[0], :: self.stride[1]].contiguous()
        mean_x, cov = Moments.apply(x.flatten(0, 2))
        weight = self.weight.flatten(1)
        mean, var = weight @ mean_x, ((weight @ cov) * weight).sum(1)
        scale = norm.weight * (var + norm.eps).rsqrt()
        kernel = self.weight * scale[:, None, None, None]
        out = conv2d(x.permute(0, 3, 1, 2), kernel, norm.bias - mean * scale)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        assert norm.momentum is not None
        count, keep, new = x.shape[:3].numel(), 1 - norm.momentum, norm.momentum
        with torch.no_grad():  # and without lerp_, which vmap does not know
            norm.num_batches_tracked.add_(1)
            norm.running_mean.mul_(keep).add_(mean, alpha=new)
            norm.running_var.mul_(keep).add_(var, alpha=new * count / (count - 1))
        return out


class Moments(Function):
    """Mean and covariance of a matrix's columns, with the gradients of both in one product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Over the rows, with the divisor n."""
        mean = x.mean(0)
        centred = x - mean  # E[xᵀx] − mean meanᵀ would cancel where the mean is large
        return mean, centred.t() @ centred / len(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        """(∂mean + (x − mean) (∂cov + ∂covᵀ)) / n."""
        x, mean = ctx.saved_tensors
        d_mean, d_cov = (grad / len(x) for grad in grad_outputs)
        both = d_cov + d_cov.t()
        return torch.addmm(d_mean - mean @ both, x, both)


def _pixels(x: Tensor) -> Tensor:
    """The same with the planes last, as they lie in memory."""
    return x.permute(0, 2, 3, 1)

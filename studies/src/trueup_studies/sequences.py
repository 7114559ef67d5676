"""Small networks on sequences of integers: words of a text, characters of a book.

Like the image networks, each has a deterministic `trunk` and a `head` with forward(x) = head(trunk(x)). Dropout layers
exist also at probability 0. Initial weights come from `seed`; the global generator is not used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = 7
"""Number of convolutions; with the linear layer, the text network has eight layers."""
POOLED = (1, 3, 5)
"""Convolutions (from 0) after which the length is halved."""


class TextCNN(nn.Module):
    """An 8-layer convolutional network on words: seven convolutions of width 3, global max pooling, a linear layer.

    Tokens (n, length) may have any length. 0 is padding and does not change the result, except through the batch
    statistics in training with `batch_norm`. Texts are cut after `length` tokens.

    >>> TextCNN(6, vocabulary=100, dropout=0.3).eval()(torch.tensor([[5, 17, 2, 0], [8, 0, 0, 0]])).shape
    torch.Size([2, 6])

    Similar to Zhang, Zhao and LeCun, "Character-level convolutional networks for text classification" (2015).
    """

    def __init__(
        self,
        classes: int = 6,
        *,
        vocabulary: int,
        width: int = 128,
        dropout: float = 0.0,
        batch_norm: bool = True,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.length = length
        with torch.device("meta"):
            self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
            self.convolutions = nn.ModuleList(
                nn.Conv1d(width, width, 3, padding=1, bias=not batch_norm) for _ in range(CONVOLUTIONS)
            )
            self.norms = nn.ModuleList(
                nn.BatchNorm1d(width) if batch_norm else nn.Identity() for _ in range(CONVOLUTIONS)
            )
            self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, classes))
        _initialise(self, seed)

    def trunk(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, length) to features (n, width)."""
        tokens = tokens[:, : self.length]
        x = self.embedding(tokens).transpose(1, 2)
        text = (tokens != 0).to(x.dtype)[:, None]
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            # The values are not negative, so max pooling ignores the zeros of the padding.
            x = F.relu(norm(convolution(x))) * text
            if number in POOLED:
                x, text = (F.max_pool1d(part, 2, ceil_mode=True) for part in (x, text))
        return x.amax(dim=2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, length) to logits (n, classes)."""
        return self.head(self.trunk(tokens))


class CharTransformer(nn.Module):
    """A causal transformer: logits of the next character at each position, from the characters up to it.

    Tokens (n, length ≤ context) give logits (n, length, classes). Dropout begins in the first feed-forward part of the
    final `random_layers` blocks. The head begins there too, so Monte-Carlo passes repeat little.

    >>> net = CharTransformer(65, context=32, width=16, heads=2, layers=2, dropout=0.1).eval()
    >>> net(torch.zeros(3, 20, dtype=torch.int64)).shape
    torch.Size([3, 20, 65])

    Vaswani et al., "Attention is all you need" (2017); normalised and initialised as in Radford et al., "Language
    models are unsupervised multitask learners" (2019).
    """

    def __init__(
        self,
        classes: int = 65,
        *,
        context: int = 128,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        random_layers: int = 1,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, {heads}, got {width}")
        if not 0 <= random_layers <= layers:
            raise ValueError(f"random_layers must lie in 0..{layers}, the number of layers, got {random_layers}")
        self.context = context
        still = 2 * (layers - random_layers) + 1 if random_layers else 2 * layers
        with torch.device("meta"):
            self.characters = nn.Embedding(classes, width)
            self.positions = nn.Embedding(context, width)
            halves: list[nn.Module] = [
                _TwoLayers(width, dropout if number >= still else None)
                if number % 2
                else _Attention(width, heads, dropout if number >= still else None)
                for number in range(2 * layers)
            ]
            self.blocks = nn.Sequential(*halves[:still])
            self.head = nn.Sequential(
                *halves[still:], nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, classes)
            )
        _initialise(self, seed)
        with torch.no_grad():  # residuals of all blocks add up: keep the variance of their sum
            for module in self.modules():
                if isinstance(module, _Attention | _TwoLayers):
                    module.output.weight.mul_(1 / math.sqrt(2 * layers))

    def trunk(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, length) to features (n, length, width)."""
        if tokens.shape[1] > self.context:
            raise ValueError(f"tokens must have at most {self.context} positions, got {tokens.shape[1]}")
        return self.blocks(self.characters(tokens) + self.positions.weight[: tokens.shape[1]])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, length) to logits (n, length, classes)."""
        return self.head(self.trunk(tokens))


class _Attention(nn.Module):
    """Causal attention with normalised input and a residual connection: the first half of a block."""

    def __init__(self, width: int, heads: int, dropout: float | None) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        # Not inside the attention, where dropout is no separate layer that can be activated.
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm(x)).reshape(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.dropout(self.output(mixed.transpose(1, 2).reshape(n, length, width)))


class _TwoLayers(nn.Module):
    """Feed-forward layers with normalised input and a residual connection: the second half of a block."""

    def __init__(self, width: int, dropout: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        # Dropout at the input too, so that the layers get random inputs; not on the hidden values, which are four times
        # as many.
        self.dropout1, self.dropout2 = (nn.Identity() if dropout is None else nn.Dropout(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout2(self.output(F.gelu(self.first(self.dropout1(self.norm(x))))))


def _initialise(network: nn.Module, seed: int) -> None:
    """Allocate and draw the weights of a network made on the meta device.

    Convolutions are N(0, 2/fan-in), suited to ReLU; embeddings and linear layers N(0, 0.02²); biases 0. They are drawn
    on the CPU, so that a seed gives the same weights on any device.
    """
    generator = torch.Generator().manual_seed(seed)
    network.to_empty(device=torch.get_default_device())
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Conv1d | nn.Linear | nn.Embedding):
                scale = math.sqrt(2 / module.weight[0].numel()) if isinstance(module, nn.Conv1d) else 0.02
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator, device="cpu") * scale)
                if isinstance(module, nn.Embedding):
                    if module.padding_idx is not None:
                        module.weight[module.padding_idx].zero_()
                elif module.bias is not None:
                    module.bias.zero_()

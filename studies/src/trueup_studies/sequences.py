"""Small networks on sequences of whole numbers: words of a text, characters of a book.

As those on images, each has a `trunk`, which draws nothing at random, and a `head`, with forward(x) = head(trunk(x));
dropout layers are there also at probability 0. Initial weights come from `seed`; the global generator is not used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = 7
"""With the linear layer on top, the text network has eight layers."""
POOLED = (1, 3, 5)
"""After which convolutions the text is halved in length."""


class TextCNN(nn.Module):
    """An 8-layer convolutional network on words: seven convolutions of width 3, their greatest values, a linear layer.

    Tokens (n, length) of any length; 0 is padding, and how much of it follows a text changes nothing (in training
    with `batch_norm`, whose statistics count it, it does).

    >>> TextCNN(6, vocabulary=100, dropout=0.3).eval()(torch.tensor([[5, 17, 2, 0], [8, 0, 0, 0]])).shape
    torch.Size([2, 6])

    In the manner of Zhang, Zhao and LeCun, "Character-level convolutional networks for text classification" (2015).
    """

    def __init__(
        self,
        classes: int = 6,
        *,
        vocabulary: int,
        width: int = 128,
        dropout: float = 0.0,
        batch_norm: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
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
        """Tokens (n, length) to features (n, width)."""
        x = self.embedding(tokens).transpose(1, 2)
        text = (tokens != 0).to(x.dtype)[:, None]
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            # What is not negative can be pooled with the zeros of the padding as if they were not there.
            x = F.relu(norm(convolution(x))) * text
            if number in POOLED:
                x, text = (F.max_pool1d(part, 2, ceil_mode=True) for part in (x, text))
        return x.amax(dim=2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (n, length) to logits (n, classes)."""
        return self.head(self.trunk(tokens))


class CharTransformer(nn.Module):
    """A causal transformer: logits of the next character at each place, from those up to it.

    Tokens (n, length ≤ context) give logits (n, length, classes). Dropout is in the last `random_layers` blocks, from
    the first of their two-layer parts on: that and what follows make up the head, so Monte-Carlo passes repeat little.

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
            self.places = nn.Embedding(context, width)
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
                    module.last.weight.mul_(1 / math.sqrt(2 * layers))

    def trunk(self, tokens: Tensor) -> Tensor:
        """Tokens (n, length) to features (n, length, width)."""
        if tokens.shape[1] > self.context:
            raise ValueError(f"tokens must have at most {self.context} places, got {tokens.shape[1]}")
        return self.blocks(self.characters(tokens) + self.places.weight[: tokens.shape[1]])

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (n, length) to logits (n, length, classes)."""
        return self.head(self.trunk(tokens))


class _Attention(nn.Module):
    """Attention to what came before, of the normalised input, added to it: the first half of a block."""

    def __init__(self, width: int, heads: int, dropout: float | None) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.wanted = nn.Linear(width, 3 * width)
        self.last = nn.Linear(width, width)
        # Not in the attention itself: there it would be no layer that could be switched on by itself.
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.wanted(self.norm(x)).reshape(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.dropout(self.last(mixed.transpose(1, 2).reshape(n, length, width)))


class _TwoLayers(nn.Module):
    """Two layers at each place by itself, of the normalised input, added to it: the second half of a block."""

    def __init__(self, width: int, dropout: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.last = nn.Linear(4 * width, width)
        # At the input too: else the layers themselves would never see anything random. Not of what is hidden, which is
        # four times as much to draw.
        self.dropout1, self.dropout2 = (nn.Identity() if dropout is None else nn.Dropout(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout2(self.last(F.gelu(self.first(self.dropout1(self.norm(x))))))


def _initialise(network: nn.Module, seed: int) -> None:
    """Give a network made on the meta device memory and weights.

    Convolutions N(0, 2/fan-in), as rectifiers want them; embeddings and linear layers N(0, 0.02²); biases 0. Drawn on
    the CPU, so that a seed means the same on any device.
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

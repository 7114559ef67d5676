from . import (
    lightning as lightning,
    onnx as onnx,
    prometheus as prometheus,
    sklearn as sklearn,
    torchmetrics as torchmetrics,
    transformers as transformers,
)

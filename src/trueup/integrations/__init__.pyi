from . import (
    boosting as boosting,
    lightning as lightning,
    lm_eval as lm_eval,
    onnx as onnx,
    prometheus as prometheus,
    ray as ray,
    sklearn as sklearn,
    spark as spark,
    torchmetrics as torchmetrics,
    tracking as tracking,
    transformers as transformers,
)

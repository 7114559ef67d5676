"""The toolkit in other people's hands: scikit-learn, torchmetrics, Lightning, transformers, ONNX, Prometheus."""

"""From a trained run to answers: predict, export, serve.

    run ──> trained ──> export ──> models/NAME/VERSION/ ──> source ──> loader ──> manager
                                                                                   │
                                     answers <── core (HTTP) <── batcher per version

`trained`, `inputs`, `answers` and `export` need nothing but PyTorch (ONNX needs `onnx` and
`onnxscript`); the server needs `pip install paceline[serve]`.
"""

"""
Backends run a model for the translator. [`~recnmt_hf.inference.backends.protocol.Backend`] is their interface;
`torch_model`, `ctranslate2_model` and `onnx_model` run one model each, `ensemble` runs several together.
"""

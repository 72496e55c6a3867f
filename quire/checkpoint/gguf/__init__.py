"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as checkpoints.

`header` reads what one says of itself.
"""

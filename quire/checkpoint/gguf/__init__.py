"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as checkpoints.

`header` reads what one says of itself, `file` all files of a model. `config` (with `families`, `rope`, `latent`) and
`tokenizer` (with `words`) make of it what other checkpoints' files say, and `folder` puts that in one place. `tensors`
has the tensors, `names` says which parameter takes which of their rows.
"""

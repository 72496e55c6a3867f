"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as checkpoints.

`header` reads what one says of itself, `file` all files of a model. `config` (with `families`, `rope`, `latent`,
`states`, `ministral`) and `tokenizer` (with `words`) make of it what other checkpoints' files say, `keys` refuses what
is left over, and `folder` puts all in one place. `tensors` has the tensors, `names` says which parameter takes which of
their rows.
"""

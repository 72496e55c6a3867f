"""JSON schemas as grammars: what a schema says, without its keywords, and how that is written."""

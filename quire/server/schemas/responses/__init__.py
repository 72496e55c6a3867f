"""What bodies of /v1/responses may say, and what they ask of the engine."""

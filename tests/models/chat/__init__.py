"""The formats of chat in which families' checkpoints are published (`formats.py`), and which a row has (`rows.py`)."""

"""More than one process and more than one machine, on Ray: `pip install quire-llm[ray]`."""

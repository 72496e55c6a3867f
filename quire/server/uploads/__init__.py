"""Adapters that come over HTTP: the form that brings them, what of it is taken, and where it lies."""

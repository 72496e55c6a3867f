"""Draft tokens: proposed, as many as are worth it, and checked."""

"""A module that cannot be imported, three exceptions deep: what is at fault is the innermost."""

try:
    import a_module_that_nobody_has  # noqa: F401
except ImportError as error:
    try:
        raise ValueError("a wrapper") from error
    except ValueError as wrapper:
        raise RuntimeError("another wrapper") from wrapper

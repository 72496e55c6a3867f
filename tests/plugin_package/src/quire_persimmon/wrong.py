"""What an entry point may name by mistake."""

NOT_A_CLASS = 7


class NotOurs:
    pass

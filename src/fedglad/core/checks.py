"""Checks of the values of settings."""


def check(settings: object, **limits: int | tuple[bool, str]) -> None:
    """Raises for the first setting that is not what it must be.

    Each setting is given by its name, with the least that it may be, or with whether it is right
    and what it must be: `check(self, classes=2, beta=(0 <= self.beta < 1, "in [0, 1)"))`.
    """
    for name, limit in limits.items():
        value = getattr(settings, name)
        good, must = (value >= limit, f"{limit} or more") if isinstance(limit, int) else limit
        if not good:
            raise ValueError(f"{type(settings).__name__}({name}={value!r}): must be {must}")

"""Checks of the values of settings."""


def check(settings: object, **limits: tuple[bool, str]) -> None:
    """Raises for the first setting that is not what it must be.

    Each setting is given by its name, with whether it is right and what it must be:
    `check(self, beta=(0 <= self.beta < 1, "in [0, 1)"))`.
    """
    for name, (good, must) in limits.items():
        if not good:
            value = getattr(settings, name)
            raise ValueError(f"{type(settings).__name__}({name}={value!r}): must be {must}")

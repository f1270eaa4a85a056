"""Numbers as the page has them."""

import math


def short(value: float | None, digits: int = 5) -> float | int | None:
    """Rounded to so many digits, a whole number as an int: a page has hundreds of thousands.

    >>> short(0.123456789), short(1.0), short(float("nan"))
    (0.12346, 1, None)
    """
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded

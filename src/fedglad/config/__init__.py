"""The configuration of a run: TOML in, checked settings out, and what there is to choose from.

>>> from fedglad.config import ConfigError, load, parse_value
>>> name, config = load("mnist", {"adapter.name": "none"})  # or a path to a TOML file
>>> name, config.rounds, config.sections["adapter"]
('mnist', 50, Adapter(groups='tensor', min_group=1))
>>> try:
...     load("mnist", {"server.rl": parse_value("0.5")})
... except ConfigError as error:
...     print(error)
unknown key 'server.rl': did you mean 'server.lr'?

`schema` has the sections, `build` makes a dataclass of plain values, `presets` come with the
library, `keys` are dotted keys, `fit` checks whether a model takes the data, and `catalogue` has
what each name stands for. May import everything that can be configured, and simulation.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.config.presets import PRESETS as PRESETS
    from fedglad.config.presets import Preset as Preset
    from fedglad.config.schema import FORMAT as FORMAT
    from fedglad.config.schema import Config as Config
    from fedglad.config.schema import ConfigError as ConfigError
    from fedglad.config.schema import find as find
    from fedglad.config.schema import load as load
    from fedglad.config.schema import parse_value as parse_value
    from fedglad.config.schema import simulate as simulate

__getattr__, __dir__ = lazily(__name__)

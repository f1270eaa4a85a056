"""The configuration of a run: TOML in, checked settings out, and what there is to choose from.

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

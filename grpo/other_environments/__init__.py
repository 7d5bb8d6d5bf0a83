"""A folder for the PYTHONPATH of environments with other versions of packages: it has this library and nothing else.

The folder above this library is often site-packages, whose packages would take the place of the environment's own.
"""

from pathlib import Path

import grpo

ALONE = str(Path(__file__).parent)
"""The folder."""
FOUND_IN = str(Path(grpo.__file__).parents[1])
"""The folder in which this process finds the library, for its children: `ALONE` in such an environment."""

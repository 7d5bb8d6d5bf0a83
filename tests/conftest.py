"""What MLflow loads caches fonts in the home folder; the tests leave nothing there."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("MPLCONFIGDIR", tempfile.mkdtemp(prefix="r1flow-matplotlib-"))

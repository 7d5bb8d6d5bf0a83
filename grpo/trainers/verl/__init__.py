"""verl (https://github.com/volcengine/verl): its settings, processes and records, translated from and to this
library's."""

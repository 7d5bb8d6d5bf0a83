"""Problems and demonstrations as JSON lines, the prompt template, completions, and held-out splits."""

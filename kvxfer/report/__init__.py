"""Results as people read them: tables for a terminal, files for other tools."""

"""Connectors: kvxfer inside inference engines, as plug-ins that those engines load."""

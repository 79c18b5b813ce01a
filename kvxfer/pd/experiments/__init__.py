"""The articles' experiments: each asks one question and answers it with a record.

``DESIGN.md`` says how they are built and what each answer stands on.
"""

"""Whether a running set-up keeps its objectives, and what to change next; DESIGN.md says how."""

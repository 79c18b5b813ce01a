"""The parts of a simulation: a clock, engines, links, caches, and the cluster that joins them."""

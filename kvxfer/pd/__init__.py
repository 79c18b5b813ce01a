"""Prefill and decode on separate engines: launch, proxy, load, analysis."""

"""One front door for prefill and decode engines: an OpenAI server in front of N x M of them.

DESIGN.md says how a request passes through each connector, and what is checked. The rooms above
need aiohttp, the extra ``pd``; `options` and `pairing` do without.
"""

"""Whether a node moves KV caches at the speed it was bought for; if not, why. See DESIGN.md."""

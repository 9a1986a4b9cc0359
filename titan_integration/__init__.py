"""torchtitan 0.2.2 as the host of `gtp_dtensor`.

Imports point one way: titan_integration -> gtp_dtensor -> torch. This file imports nothing, because
`titan_integration.cpu` has to run before the first torchtitan import.
"""

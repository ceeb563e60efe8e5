"""What crosses the wire, and the decisions about it: pure values and functions, without any input or output.

Nothing here imports torch, aiohttp, asyncio, threading, time or os, so every path can be tested without a socket.
"""

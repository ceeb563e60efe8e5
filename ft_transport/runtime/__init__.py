"""Support that Python itself lacks: interrupted threads, slow imports, safe opening of files, the end of a process.

All packages may import this one; it imports no other.
"""

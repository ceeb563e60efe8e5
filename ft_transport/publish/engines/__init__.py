"""The protocols by which versions are delivered to each kind of inference engine. A new kind is a module like ``vllm``.

``publish`` imports this package. Nothing here depends on ranks, or on the content of a version's files.
"""

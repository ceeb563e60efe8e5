"""The protocols by which versions are delivered to engines. Each kind of engine has its own module, such as ``vllm``.

``publish`` imports this package. Nothing here depends on ranks, or on the content of a version's files.
"""

"""The protocols by which versions are delivered to inference engines. Each kind of engine has a module (``vllm``).

``publish`` imports this package. Nothing here depends on ranks, or on the content of a version's files.
"""

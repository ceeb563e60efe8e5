"""How each kind of inference engine is notified of a version. Another kind needs one more file like ``vllm``.

``publish`` imports this package. Nothing here depends on ranks, or on files of a version beyond their paths.
"""

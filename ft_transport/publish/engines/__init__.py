"""How each kind of inference engine is notified of a version. A further kind is one more file like ``vllm``.

``publish`` comes in. Nothing here knows ranks or files of a version beyond their paths.
"""

"""Reasoning: what a model writes for itself before its answer, as `<think>…</think>`.

`think` tells it from the answer, `styles` knows the markers of the models' families. Read by `server.chat_parts`.
"""

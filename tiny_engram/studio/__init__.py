"""The Studio: register, teach, compare and share concepts in a browser.

Importing it loads nothing. Its modules stand on the pipelines and below the command line; only `ui` and `server` import gradio.
"""

"""The pages of the Studio. Beside server.py, the only place that imports gradio."""

"""The HTTP server: OpenAI's and Anthropic's wire formats over one engine, metrics, and a live view."""

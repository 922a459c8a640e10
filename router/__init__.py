"""The gateway: an OpenAI-compatible endpoint in front of vLLM replicas."""

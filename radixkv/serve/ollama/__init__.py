"""Ollama's API: chat and generate over one model, and the lists of models, for the apps that speak nothing else."""

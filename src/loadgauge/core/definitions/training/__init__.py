"""How a model is trained: precision, optimizer, framework, releases, tasks."""

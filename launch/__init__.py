"""Real SGLang servers on one machine: the model, the processes, network namespaces, requests, and the demo."""

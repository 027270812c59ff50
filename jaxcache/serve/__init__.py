"""The engine seen from outside: OpenAI-compatible server, metrics, KV events. `pip install 'jaxcache[serve]'`."""

"""Adapters that give an LLM engine the pool. One engine a module; nothing here imports an engine until it is asked to.

    kvpool_connector.vllm    `KVPoolConnector`, loaded by vLLM through its module path
"""

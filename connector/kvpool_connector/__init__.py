"""Adapters that give an LLM engine the pool, one engine a module. No engine is imported before its module is.

kvpool_connector.vllm    `KVPoolConnector`, loaded by vLLM through its module path
"""

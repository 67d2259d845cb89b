"""OpenAI's Responses API: POST /v1/responses, and the stored responses at /v1/responses/{id}.

`schemas`, `items` and `tools` read requests, `events` writes responses, and `store` keeps them. `endpoint` connects
them to `radixkv.serve.turn`.
"""

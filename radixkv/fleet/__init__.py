"""Serve an engine as a worker of a fleet: several processes and one frontend, which routes by cached prefix.

The fleet is NVIDIA Dynamo's: discovery, routing, moving streams off dead workers. Only this package imports `dynamo`.

command.py       `radixkv worker`: options, checks, the model's load
worker.py        Dynamo's interface of an engine
requests.py      Dynamo's requests and chunks, and those of the engine
publisher.py     the events of cached blocks, and the use of the pool, for the router
model_folder.py  the files of a model that a frontend reads
roles.py         prefill apart from decode: the two roles of workers
transport.py     runs over TCP, from a prefill worker to decode workers
"""

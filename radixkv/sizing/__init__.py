"""The sizes of a model's KV and recurrent state, and how memory is divided between them.

`kv_size` has the records of a model's sizes, and parses sizes such as "8GiB". `kv_shapes` and `state_shapes` read these
sizes from a model's config. `recurrent_state` has the records that cache and model share. `memory` divides the free
memory. This file imports none of them: the cache imports `recurrent_state` alone.
"""

"""The prefix cache without a model: it plans which slots to write, and a numpy array stands for the KV.

python examples/cache_alone.py
"""

import numpy as np

from radixkv.cache import Hint, PrefixCache

BLOCK_SIZE = 4
cache = PrefixCache(num_blocks=16, block_size=BLOCK_SIZE)
kv = np.zeros((16, BLOCK_SIZE), dtype=np.int64)  # the "KV" of a token is its square here


def compute(sequence, tokens):
    """Extend the sequence: do the copies, write the slots, then say that it is done."""
    plan = sequence.extend(tokens)
    for source, destination in plan.copies:  # whole blocks, before anything is written
        kv[destination] = kv[source]
    kv.reshape(-1)[plan.slots] = np.square(tokens)
    sequence.commit()  # now others can find it


def read(sequence):
    """The KV of a sequence, through its block table."""
    return kv[sequence.block_table].reshape(-1)[: sequence.length]


prompt = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], dtype=np.int32)
with cache.open(prompt) as sequence:  # nothing is cached yet
    compute(sequence, prompt)

question = np.array([3, 1, 4, 1, 5, 9, 2, 7, 1, 8], dtype=np.int32)
print(cache.explain(question))  # 7 of 10 tokens are cached: at token 7 the prompt diverges from what is cached.

with cache.open(question) as sequence:  # holds the 7 tokens that both begin with, though 7 ends inside a block
    compute(sequence, question[sequence.cached_length :])
    branch = sequence.fork()  # shares everything so far
    compute(branch, np.array([2, 8], dtype=np.int32))
    compute(sequence, np.array([4, 5], dtype=np.int32))
    print("first: ", read(sequence))
    print("branch:", read(branch))
    assert read(sequence).tolist() == [token**2 for token in [*question, 4, 5]]
    assert read(branch).tolist() == [token**2 for token in [*question, 2, 8]]
    branch.close(Hint(done=True))  # this branch is not needed again: the first to be evicted

stats = cache.stats()
print(f"hit rate {stats.hit_rate:.0%}, {stats.cached_blocks} blocks cached, {stats.free_blocks} free")

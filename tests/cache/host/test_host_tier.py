"""The second tier of the cache: which runs are resident on the host, and how they come back."""

import pytest

from radixkv.cache.host import HostPrefixCache
from radixkv.errors import InvalidInput


def test_without_host_tokens_nothing_can_be_loaded() -> None:
    cache = HostPrefixCache(8, 4, host_blocks=16)
    with cache.open([1, 2, 3]) as sequence:
        assert sequence.loadable([1, 2, 3]) == 0
        with pytest.raises(InvalidInput, match="0 of them are resident on the host"):
            sequence.load([1, 2, 3])
        sequence.extend([1, 2, 3])
        sequence.commit()
    assert cache.match([1, 2, 3]).length == 3
    assert cache.match([1, 2, 3]).host == 0
    assert cache.moves() == []
    assert cache.stats().host_blocks == cache.stats().host_free_blocks == 16
